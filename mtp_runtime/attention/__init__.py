"""Attention: the ways to verify K + 1 tokens of a request in one decode step."""
