"""docs/conformance.md says what there is."""

import re
from pathlib import Path

import pytest

from mtp_runtime.adapters.vllm_ascend.install import VERSIONS
from mtp_runtime.adapters.vllm_ascend.registry import PATCHES

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "conformance.md").read_text()


def test_the_table_has_every_patch_and_its_stage() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", TEXT, re.M))
    assert rows == {patch.name: "configuration" if patch.stage == "config" else patch.stage for patch in PATCHES}


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_a_row_names_what_is_replaced(patch: object) -> None:
    row = next(line for line in TEXT.splitlines() if line.startswith(f"| `{patch.name}`"))  # type: ignore[attr-defined]
    for target in patch.targets:  # type: ignore[attr-defined]
        owner = target.name.split(".")[0]
        assert owner in row or "Scheduler" in owner, f"{target}: {owner} is not in the row"


def test_the_releases_are_named() -> None:
    assert all(release in TEXT for release in VERSIONS)


def test_files_it_names_are_there() -> None:
    for path in re.findall(r"`((?:tests|mtp_runtime|docs)/[\w/.-]+)`", TEXT):
        assert (ROOT / path).exists(), path
