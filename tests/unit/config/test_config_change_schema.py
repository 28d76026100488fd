"""The schemas for editors: as committed, as the configuration's own, and named by every inventory's file."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from inventory_copy import Copy
from rule_cases import CASES, Case
from typer.testing import CliRunner

from mtp_runtime.cli.app import app
from mtp_runtime.config import api, editor_schema
from mtp_runtime.config.files import NAMES, Files
from mtp_runtime.config.load import load_files
from mtp_runtime.config.problems import ConfigError

SHIPPED = sorted(p.name for p in api.inventories().iterdir() if (p / "hosts.yml").is_file())
DOCUMENTS = {section: json.loads(text) for section, text in editor_schema.documents().items()}
VALIDATORS = {section: jsonschema.Draft7Validator(found) for section, found in DOCUMENTS.items()}


def problems_of(folder: Path) -> list[str]:
    """What an editor would underline, over all files of an inventory."""
    return [
        f"{section}: {error.json_path}: {error.message}"
        for section, name in NAMES.items()
        for error in VALIDATORS[section].iter_errors(yaml.safe_load((folder / name).read_text()))
    ]


@pytest.mark.parametrize("section", NAMES)
def test_the_committed_file_is_the_generated_one(section: str) -> None:
    """Where it differs: mtpctl schema --write."""
    file = api.repository() / editor_schema.FOLDER / f"{section}.json"
    assert file.read_text() == editor_schema.documents()[section]
    jsonschema.Draft7Validator.check_schema(DOCUMENTS[section])
    assert {p.name for p in file.parent.iterdir()} == {f"{name}.json" for name in NAMES}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_inventories_are_valid(name: str) -> None:
    assert problems_of(api.inventories() / name) == []


@pytest.mark.parametrize("section", NAMES)
@pytest.mark.parametrize("name", SHIPPED)
def test_the_first_line_of_every_file_names_its_schema(name: str, section: str) -> None:
    file = api.inventories() / name / NAMES[section]
    first = file.read_text().splitlines(keepends=True)[0]
    assert first == editor_schema.header(section)
    named = first.split("$schema=")[1].strip()
    assert (file.parent / named).resolve() == api.repository() / editor_schema.FOLDER / f"{section}.json"


SHAPES = [case for case in CASES if case.rule in ("C01", "C02", "C03", "C07") and not case.text]


@pytest.mark.parametrize("case", SHAPES, ids=lambda case: f"{case.rule}-{case.key}")
def test_an_editor_sees_what_the_check_refuses(case: Case, copy: Callable[[str], Copy]) -> None:
    found = copy(case.base).edit(case.breaks)
    shown = problems_of(found.folder)
    assert shown and case.key.split(".")[-1].split("[")[0] in " ".join(shown)


@pytest.mark.parametrize("case", [case for case in CASES if case.holds], ids=lambda case: f"{case.rule}-{case.key}")
def test_an_editor_is_silent_on_what_holds(case: Case, copy: Callable[[str], Copy]) -> None:
    assert problems_of(copy(case.base).edit(case.holds).folder) == []


def test_a_missing_section_is_seen(copy: Callable[[str], Copy]) -> None:
    found = copy("local")
    found.file("mtp").write_text("ntp: {}\n")
    assert any("'mtp' is a required property" in one for one in problems_of(found.folder))
    found.file("hosts").write_text("all: {children: {}, hosts: {'-bad name': {}}}\n")
    assert any("-bad name" in one for one in problems_of(found.folder))


LOCAL = {section: yaml.safe_load((api.inventories() / "local" / name).read_text()) for section, name in NAMES.items()}
LEAVES = [
    ("mtp", ("mtp", "num_speculative_tokens")),
    ("mtp", ("mtp", "enabled")),
    ("mtp", ("mtp", "padding")),
    ("model", ("model", "name")),
    ("model", ("model", "path")),
    ("topology", ("topology", "decode", "port")),
    ("topology", ("topology", "connector")),
    ("serving", ("serving", "kv_cache_bytes")),
    ("serving", ("serving", "gpu_memory_utilization")),
    ("serving", ("serving", "decode")),
    ("serving", ("serving", "compilation_config")),
    ("hosts", ("all", "hosts", "localhost", "address")),
]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**6), 10**9),
    st.floats(-2, 2).filter(lambda value: not value.is_integer()),
    st.sampled_from(
        ["auto", "slack", "", "a b", "{x}", "-x", "a" * 200, "127.0.0.1", "NixlConnector", [], [1], {}, {"x": 1}]
    ),
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(LEAVES), VALUES)
def test_editor_and_check_agree_on_any_value(leaf: tuple[str, tuple[str, ...]], value: Any) -> None:
    section, path = leaf
    data = json.loads(json.dumps(LOCAL))
    node = data[section]
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    content = {name: yaml.safe_dump(one).encode() for name, one in data.items()}
    try:
        load_files(Files("local", content.__getitem__, lambda name: name))
        taken = True
    except ConfigError:
        taken = False
    assert VALIDATORS[section].is_valid(data[section]) == taken


def test_as_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*words: str) -> str:
        result = CliRunner().invoke(app, ["schema", *words])
        assert result.exit_code == 0, result.output
        return result.stdout

    assert run("mtp") == editor_schema.documents()["mtp"]
    assert json.loads(run()) == DOCUMENTS
    refused = CliRunner().invoke(app, ["schema", "nothing"])
    assert (refused.exit_code, "name one of hosts, model" in refused.stderr) == (2, True)
    monkeypatch.setattr(api, "repository", lambda: tmp_path)
    run("--write")
    assert {p.name: p.read_text() for p in (tmp_path / "docs/schema").iterdir()} == {
        f"{section}.json": text for section, text in editor_schema.documents().items()
    }


def test_a_copy_names_its_schemas_too(tmp_path: Path) -> None:
    shutil.copytree(api.inventories() / "a3", tmp_path / "ansible/inventories/mine")
    for section, name in NAMES.items():
        file = tmp_path / "ansible/inventories/mine" / name
        named = file.read_text().splitlines()[0].split("$schema=")[1]
        assert os.path.normpath(file.parent / named) == str(tmp_path / editor_schema.FOLDER / f"{section}.json")
