"""Adapters: the only importers of an engine."""
