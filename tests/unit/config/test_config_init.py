"""`mtpctl init`: a copy that passes its check, and what is left to edit."""

import json
import os
import shutil
from pathlib import Path

import pytest
from inventory_copy import Copy
from typer.testing import CliRunner, Result

from mtp_runtime.cli.main import app
from mtp_runtime.config import api, new
from mtp_runtime.config.files import NAMES

SHIPPED = sorted(p.name for p in api.inventories().iterdir() if (p / "hosts.yml").is_file())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with every shipped inventory."""
    shutil.copytree(api.inventories(), tmp_path / "inventories")
    return tmp_path / "inventories"


def init(root: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["init", "--inventories", str(root), *words])


def listing(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.mark.parametrize("source", SHIPPED)
def test_a_copy_of_every_inventory_passes_its_check(source: str, root: Path) -> None:
    before = listing(root)
    answer = json.loads(init(root, "my-cluster_1", "--from", source, "--json").stdout)
    assert (answer["ok"], answer["cluster"], answer["from"]) == (True, "my-cluster_1", source)
    assert answer["folder"] == str(root / "my-cluster_1")
    after = listing(root)
    assert {name: after[name] for name in before} == before
    made = {name.removeprefix("my-cluster_1/"): content for name, content in after.items() if name not in before}
    assert made == {name: before[f"{source}/{name}"] for name in NAMES.values()}
    assert not [p for p in root.iterdir() if p.name.startswith(".")]
    assert api.plan("my-cluster_1", root)["ranks"] == api.plan(source, root)["ranks"]
    for one in answer["edit"]:
        line = Path(one["file"]).read_text().splitlines()[one["line"] - 1]
        assert one["value"] in line and one["key"].rsplit(".", 1)[1] in line, one


def test_what_only_its_owner_may_read_stays_so(root: Path) -> None:
    """hosts.yml may hold passwords."""
    (root / "a3/hosts.yml").chmod(0o600)
    assert init(root, "prod", "--from", "a3").exit_code == 0
    assert (root / "prod/hosts.yml").stat().st_mode & 0o777 == 0o600
    assert (root / "prod/group_vars/all/mtp.yml").stat().st_mode & 0o777 == 0o644


def test_what_to_edit_in_a_copy_of_a3(root: Path) -> None:
    result = init(root, "prod", "--from", "a3")
    assert result.exit_code == 0, result.stderr
    shown = result.stdout
    for host in ("p0", "p1", "d0", "d1"):
        assert f"all.hosts.{host}.address: 192.0.2." in shown and f"all.hosts.{host}.nic: eth0" in shown
    for key in ("serving.router.host", "monitoring.host", "model.path", "model.manifest"):
        assert f": {key}: " in shown
    assert "documentation range" in shown and "a port of" not in shown
    assert "make check CLUSTER=prod, make render CLUSTER=prod, make deploy CLUSTER=prod" in shown
    assert "mtpctl set prod KEY=VALUE" in shown


def test_ports_of_this_machine_are_named(root: Path) -> None:
    keys = {one.key: one.why for one in new.init("second", "local", root)[1]}
    assert set(keys) == {
        *(f"topology.{role}.{name}" for role in ("prefill", "decode") for name in ("port", "side_channel_port")),
        *(f"serving.router.{name}" for name in ("port", "backend_port", "metrics_port")),
        *("monitoring.prometheus_port", "monitoring.exporter_port"),
    }
    assert all(why.startswith("a port of local,") for why in keys.values())
    assert {one.why.split(",")[0] for one in new.init("third", "local-single", root)[1]} == {"a port of local-single"}
    shutil.rmtree(root / "third")
    shutil.rmtree(root / "local-single")
    shutil.copytree(root / "second", root / "broken")
    (root / "broken/hosts.yml").write_text("[")
    assert len(new.init("fourth", "second", root)[1]) == 9


@pytest.mark.parametrize(
    "name",
    ["a3", "", ".", "..", "../new", "a/b", "/tmp/new", "-new", "_new", "new.1", "n" * 65, "neu er", "新", "a\nb"],
)
def test_a_name_that_is_taken_or_bad_is_refused(name: str, root: Path) -> None:
    before = listing(root.parent)
    result = init(root, "--from", "local", "--json", "--", name)
    assert result.exit_code == 2, result.output
    (problem,) = json.loads(result.stdout)["problems"]
    assert (problem["rule"], problem["file"], problem["key"]) == ("C03", "command line", "NAME")
    assert ("exists already" if name == "a3" else "not a usable cluster name") in problem["message"]
    assert listing(root.parent) == before


@pytest.mark.parametrize(
    ("source", "rule"), [("nobody", "C04"), ("../inventories/a3", "C03"), ("/etc", "C03"), ("", "C03"), (".", "C03")]
)
def test_a_source_elsewhere_is_refused(source: str, rule: str, root: Path) -> None:
    before = listing(root)
    result = init(root, "new", "--from", source)
    assert (result.exit_code, result.stderr.split()[0]) == (2, rule)
    assert listing(root) == before and not (root / "new").exists()


def test_what_stands_in_the_way_is_left_alone(root: Path) -> None:
    (root / "file").write_text("mine")
    (root / "empty").mkdir()
    (root / "link").symlink_to(root / "nowhere")
    for name in ("file", "empty", "link"):
        assert "exists already" in init(root, name, "--from", "local").stderr
    assert (root / "file").read_text() == "mine" and (root / "link").is_symlink()


def test_a_broken_source_is_refused_with_its_problems(root: Path) -> None:
    Copy(root, "local").edit({"mtp.num_speculative_tokens": 16, "mtp.method": "mpt"})
    result = init(root, "new", "--from", "local")
    assert result.exit_code == 2
    assert "R03" in result.stderr and "R19" in result.stderr and "local/group_vars/all/mtp.yml" in result.stderr
    assert not (root / "new").exists()
    assert "--from" in init(root, "new").stderr


def test_only_the_files_of_an_inventory_are_copied(root: Path) -> None:
    (root / "local/.notes").write_text("x")
    (root / "local/README.md").write_text("x")
    (root / "local/group_vars/all/.mtp.yml.swp").write_text("x")
    new.init("new", "local", root)
    assert {str(p.relative_to(root / "new")) for p in (root / "new").rglob("*") if p.is_file()} == set(NAMES.values())


def test_a_full_disk_leaves_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(os.listdir(root))

    def full(self: Path, *_: object) -> int:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        new.init("new", "local", root)
    assert set(os.listdir(root)) == before


@pytest.mark.parametrize("name", ["all", "ungrouped", "localhost"])
def test_names_that_ansible_has_a_meaning_for_are_refused(name: str, root: Path) -> None:
    before = listing(root)
    result = init(root, name, "--from", "local")
    assert (result.exit_code, "a meaning of its own for Ansible" in result.stderr) == (2, True)
    assert listing(root) == before
