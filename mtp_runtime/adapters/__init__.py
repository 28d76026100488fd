"""Adapters: the only importers of an engine, and at the top what both of them use."""
