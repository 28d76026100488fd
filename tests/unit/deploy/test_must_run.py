"""Continuous integration fails when a test that must run was skipped."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("reason", "must_run", "code"),
    [("no compiler", "1", 1), ("no compiler", "0", 0), ("root may write everywhere", "1", 0)],
)
def test_a_skip(reason: str, must_run: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(f"import pytest\ndef test_it(): pytest.skip({reason!r})\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-c", str(tmp_path / "pytest.ini")]
    env = {**os.environ, "MTP_MUST_RUN": must_run, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, str(tmp_path)], env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    assert ("skipped, and must run" in done.stdout) == bool(code)
