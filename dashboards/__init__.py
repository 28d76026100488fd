"""Dashboards as code: `build.py` writes `grafana/*.json`."""
