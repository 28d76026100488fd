"""Metrics of the appliance: names, formulas, exporter and the Prometheus scrape configuration.

Nothing here imports an engine, torch or vLLM: everything works on scraped text and plain numbers.
"""
