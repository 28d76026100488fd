"""Cluster files -> checked cluster -> plan. Imports no engine."""
