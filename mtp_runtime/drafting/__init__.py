"""Drafting with the model's own MTP layer, without an engine."""
