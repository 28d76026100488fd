"""Every rule fires where it must and is silent on the nearest sound inventory."""

import copy as copying
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from inventory_copy import Copy
from rule_cases import CASES, WARNED, Case

from mtp_runtime.config import api, reference, rules
from mtp_runtime.config.files import PASSED_OVER
from mtp_runtime.config.problems import ConfigError, Problem
from mtp_runtime.config.rule import WHERE_TEXT

MakeCopy = Callable[[str], Copy]
SHIPPED = sorted(file.parent.name for file in api.inventories().glob("*/hosts.yml"))
PLAN_RULES = [rule for rule in rules.RULES if rule.check_plan]


def problems_of(found: Copy) -> list[Problem]:
    """What is wrong with a copy."""
    try:
        api.load_checked(found.name, found.root)
    except ConfigError as error:
        return error.problems
    return []


def broken(case: Case, copy: MakeCopy) -> Copy:
    """A copy with the case's edits."""
    found = copy(case.base).edit(case.breaks)
    if case.text:
        section, old, new = case.text
        text = found.file(section).read_text()
        assert old in text
        found.file(section).write_text(text.replace(old, new, 1))
    return found


def ident(case: Case) -> str:
    return f"{case.rule}-{case.base}-{case.key}"


def test_every_checked_rule_has_a_case() -> None:
    checked = {rule.id for rule in rules.RULES if rule.check or rule.where == "files"}
    # C04 needs a missing file: test_missing_file below.
    assert {case.rule for case in CASES} == checked - {"C04"}
    assert {case.rule for case in CASES if case.holds} == checked - {"C04"}


def test_ids_are_unique_and_rules_complete() -> None:
    ids = [rule.id for rule in rules.RULES]
    assert len(set(ids)) == len(ids)
    assert {f"R{n:02}" for n in range(1, 22)} <= set(ids)
    for rule in rules.RULES:
        assert rule.where in WHERE_TEXT, "a rule that is not built"
        assert (rule.check is not None or rule.check_plan is not None) == (rule.where == "check"), rule.id
        assert (rule.warn is not None) == (rule.where == "warning"), rule.id
        assert rule.message and rule.source and rule.remedy and rule.name


def test_the_inventories_that_are_meant_to_ship_do() -> None:
    a3 = ["a3", "a3-single", "a3-v31", "a3-v32"]
    assert [*a3, "lab", "local", "local-single", "seed-online"] == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_inventories_break_no_rule(name: str) -> None:
    assert api.load_checked(name).name == name


@pytest.mark.parametrize("case", CASES, ids=ident)
def test_rule_fires(case: Case, copy: MakeCopy) -> None:
    found = problems_of(broken(case, copy))
    hits = [p for p in found if p.rule == case.rule and p.key == case.key]
    assert hits, [p.text() for p in found]
    problem = hits[0]
    assert Path(problem.file).is_file()
    assert problem.message and problem.remedy
    if problem.key != "(file)" and problem.line:
        # The line is the key's own, or that of the nearest key that is written.
        line = Path(problem.file).read_text().splitlines()[problem.line - 1]
        written = problem.key.split(".")
        assert any(part.split("[")[0] in line for part in written), (problem, line)


@pytest.mark.parametrize("case", [c for c in CASES if c.holds], ids=ident)
def test_rule_is_silent(case: Case, copy: MakeCopy) -> None:
    assert [p.text() for p in problems_of(copy(case.base).edit(case.holds))] == []


def warnings_of(found: Copy) -> list[tuple[str, str]]:
    """(rule, key) of each warning."""
    return [(w.rule, w.key) for w in api.check(found.name, found.root).warnings]


def test_every_warning_has_a_case() -> None:
    warned = {rule.id for rule in rules.RULES if rule.warn}
    assert {case.rule for case in WARNED} == {case.rule for case in WARNED if case.holds} == warned


@pytest.mark.parametrize("case", WARNED, ids=ident)
def test_warning_warns(case: Case, copy: MakeCopy) -> None:
    assert (case.rule, case.key) in warnings_of(copy(case.base).edit(case.breaks))


@pytest.mark.parametrize("case", WARNED, ids=ident)
def test_warning_is_silent(case: Case, copy: MakeCopy) -> None:
    assert warnings_of(copy(case.base).edit(case.holds)) == []


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_inventories_warn_of_nothing(name: str) -> None:
    warned = [w.rule for w in api.check(name).warnings]
    assert warned == (["W04"] if name == "seed-online" else []), "the 0.11 line is rendered only"


@pytest.mark.parametrize("key", ["topology.decode.release", "serving.kv_pool"])
def test_what_a_rule_calls_impossible_has_no_key(key: str, copy: MakeCopy) -> None:
    """R14: one release for all ranks; R16: no KV pool."""
    assert [(p.rule, p.key) for p in problems_of(copy("a3").edit({key: "0.18.0"}))] == [("C01", key)]


def test_a_problem_says_everything(copy: MakeCopy) -> None:
    found = copy("a3").edit({"mtp.num_speculative_tokens": 16, "hosts.all.hosts.p0.kv_port": 35999})
    by_rule = {p.rule: p for p in problems_of(found)}
    k, port = by_rule["R03"], by_rule["R01"]
    assert (k.key, k.value, port.key, port.value) == (
        "mtp.num_speculative_tokens",
        "16",
        "all.hosts.p0.kv_port",
        "35999",
    )
    for problem in (k, port):
        rule = rules.get(problem.rule)
        assert (problem.source, problem.remedy) == (rule.source, rule.remedy)
        place = f"{problem.file}:{problem.line}: {problem.key}: {problem.value}: [{problem.rule}] "
        assert problem.text().startswith(place + problem.message)
        assert problem.text().endswith(f" Remedy: {rule.remedy}. Source: {rule.source}")
    shape = problems_of(copy("local").edit({"mtp.num_speculative_tokens": "two"}))
    assert [p.source for p in shape] == [rules.get("C02").source]


@pytest.mark.parametrize("section", ["hosts", "model", "topology", "mtp", "serving", "monitoring"])
def test_missing_file(section: str, copy: MakeCopy) -> None:
    found = copy("local")
    found.file(section).unlink()
    assert [(p.rule, p.file, p.key) for p in problems_of(found)] == [("C04", str(found.file(section)), "(file)")]


@pytest.mark.parametrize(
    "place",
    [
        *("group_vars/all/extra.yml", "group_vars/decode.yml", "host_vars/localhost.yml"),
        *("hosts2.yml", "hosts.ini", "dyn.sh", "hosts", "old/hosts.yml"),
    ],
)
def test_file_that_only_ansible_would_read(place: str, copy: MakeCopy) -> None:
    found = copy("local")
    file = found.folder / place
    file.parent.mkdir(exist_ok=True)
    file.write_text("mtp: {enabled: false}\n")
    # Of a folder that has no place there, the folder.
    named = file.parent if place.startswith("old/") else file
    assert [(p.rule, p.file) for p in problems_of(found)] == [("C01", str(named))]


def test_files_that_ansible_passes_over_may_stay(copy: MakeCopy) -> None:
    """The list is Ansible's own."""
    found = copy("local")
    for name in (".hosts.yml.swp", "README.md", "notes.txt", "hosts.yml~", "hosts.yml.bak", "hosts.yml.orig"):
        (found.folder / name).write_text("all: {}\n")
    assert problems_of(found) == []
    shown = subprocess.run(
        [Path(sys.executable).with_name("ansible-config"), "dump", "--format", "json"],
        env={**os.environ, "ANSIBLE_CONFIG": str(api.repository() / "ansible/ansible.cfg"), "LC_ALL": "C.UTF-8"},
        capture_output=True,
        check=True,
    )
    settings = {one["name"]: one["value"] for one in json.loads(shown.stdout) if "name" in one}
    assert set(PASSED_OVER) == set(settings["INVENTORY_IGNORE_EXTS"])
    assert settings["INVENTORY_IGNORE_PATTERNS"] == []


def test_all_failures_are_reported_at_once(copy: MakeCopy) -> None:
    edits = {"mtp.num_speculative_tokens": 16, "mtp.method": "mpt", "topology.decode.port": 8200}
    found = problems_of(copy("local").edit(edits))
    assert {p.rule for p in found} == {"R03", "R19", "R30"}
    shape = problems_of(copy("local-single").edit({"mtp.k": 1, "model.dtype": 3, "serving.router.port": 0}))
    assert sorted(p.rule for p in shape) == ["C01", "C03", "C03"]


def tampered(plan: dict[str, Any], name: str, flag: str, value: str) -> dict[str, Any]:
    """The plan with one flag of one rank changed."""
    plan = copying.deepcopy(plan)
    argv = next(rank["argv"] for rank in plan["ranks"] if rank["name"] == name)
    argv[argv.index(flag) + 1] = value
    return plan


KV = {"kv_connector": "MooncakeLayerwiseConnector", "kv_role": "kv_consumer", "kv_port": "36200"}
PLAN_CASES = (
    ("R02", "prefill-0", "--speculative-config", json.dumps({"num_speculative_tokens": 2, "method": "mtp"})),
    ("R02", "decode-31", "--speculative-config", json.dumps({"num_speculative_tokens": 0, "method": "mtp"})),
    (
        "R07",
        "decode-5",
        "--kv-transfer-config",
        json.dumps(KV | {"kv_connector_extra_config": {"prefill": {"dp_size": 4, "tp_size": 8}}}),
    ),
    ("R08", "decode-7", "--data-parallel-rank", "6"),
    ("R08", "decode-16", "--data-parallel-address", "192.0.2.22"),
    ("R08", "prefill-3", "--data-parallel-rpc-port", "12322"),
)


@pytest.mark.parametrize(("rule", "rank", "flag", "value"), PLAN_CASES)
def test_plan_rule_fires(rule: str, rank: str, flag: str, value: str) -> None:
    plan = api.plan("a3")
    assert rules.check_plan(plan) == []
    assert {found.id for found, _ in rules.check_plan(tampered(plan, rank, flag, value))} == {rule}


def test_every_plan_rule_has_a_case() -> None:
    assert {rule.id for rule in PLAN_RULES} == {case[0] for case in PLAN_CASES}


def test_mtp_on_one_side_only_is_found() -> None:
    plan = api.plan("local")
    argv = plan["ranks"][1]["argv"]
    at = argv.index("--speculative-config")
    del argv[at : at + 2]
    assert [rule.id for rule, _ in rules.check_plan(plan)] == ["R02"]


def test_documentation_is_generated() -> None:
    documents = api.repository() / "docs"
    assert (documents / "rules.md").read_text() == rules.markdown(), "run: mtpctl rules --markdown > docs/rules.md"
    written = (documents / "configuration.md").read_text()
    assert written == reference.markdown(), "run: mtpctl keys --markdown > docs/configuration.md"


def test_every_key_of_the_shipped_inventories_is_documented() -> None:
    text = reference.markdown()
    for name in SHIPPED:
        data = api.load_checked(name).model_dump(exclude_unset=True)
        for section in ("model", "topology", "mtp", "serving", "monitoring"):
            for key in data[section]:
                assert f"| `{section}.{key}` |" in text
