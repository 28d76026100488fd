"""These tests run where `make test-unit` puts them: on Triton's interpreter, with the real triton-ascend."""

from __future__ import annotations

import os

import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """What the interpreter does with NumPy is its own business."""
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array:DeprecationWarning:triton")
