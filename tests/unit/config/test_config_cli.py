"""mtpctl as an operator meets it: exit codes, messages, and that nothing is changed by a refusal."""

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inventory_copy import DELETE, Copy
from ruamel.yaml import YAML
from typer.testing import CliRunner, Result

from mtp_runtime.cli.app import app, main
from mtp_runtime.config import api

MakeCopy = Callable[[str], Copy]


def mtpctl(*words: str) -> Result:
    """One call in this process."""
    return CliRunner().invoke(app, words)


def process(*words: str) -> subprocess.CompletedProcess[str]:
    """One call as a process of its own."""
    env = {**os.environ, "COLUMNS": "200"}
    command = [sys.executable, "-m", "mtp_runtime.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=api.repository(), env=env, check=False)


# What is wrong -> (edits, file, key, rule)
BAD = {
    "wrong type": ({"mtp.num_speculative_tokens": "two"}, "mtp", "mtp.num_speculative_tokens", "C02"),
    "unknown key": ({"serving.max_num_seq": 4}, "serving", "serving.max_num_seq", "C01"),
    "K=16": ({"mtp.num_speculative_tokens": 16}, "mtp", "mtp.num_speculative_tokens", "R03"),
    "unknown method": ({"mtp.method": "mpt"}, "mtp", "mtp.method", "R19"),
    "two instances on one port": ({"topology.decode.port": 8200}, "topology", "topology.decode.port", "R30"),
}


@pytest.mark.parametrize("command", ["check", "render"])
@pytest.mark.parametrize("name", BAD)
def test_bad_inventory_is_refused(name: str, command: str, copy: MakeCopy) -> None:
    edits, section, key, rule = BAD[name]
    found = copy("local").edit(edits)
    before = found.content()
    result = mtpctl(command, "local", "--inventories", str(found.root))
    assert result.exit_code == 2, result.output
    assert str(found.file(section)) in result.stderr
    assert key in result.stderr
    assert rule in result.stderr
    assert "remedy:" in result.stderr
    assert "Traceback" not in result.output
    assert found.content() == before


def test_bad_inventory_as_json(copy: MakeCopy) -> None:
    found = copy("local").edit({"mtp.num_speculative_tokens": 16, "mtp.method": "mpt"})
    result = mtpctl("check", "local", "--json", "--inventories", str(found.root))
    assert result.exit_code == 2
    answer = json.loads(result.stdout)
    assert answer["ok"] is False
    assert [(p["rule"], p["key"]) for p in answer["problems"]] == [
        ("R03", "mtp.num_speculative_tokens"),
        ("R19", "mtp.method"),
    ]
    assert all(p["file"] == str(found.file("mtp")) and p["line"] > 0 for p in answer["problems"])


@pytest.mark.parametrize("name", ["local", "local-single", "a3"])
def test_shipped_inventories_pass(name: str) -> None:
    assert mtpctl("check", name).exit_code == 0
    answer = mtpctl("render", name, "--json")
    assert answer.exit_code == 0
    assert json.loads(answer.stdout)["cluster"] == name


@pytest.mark.parametrize("name", ["", ".", "..", "/", "/etc", "../local", "a3/group_vars", "local/.."])
@pytest.mark.parametrize("command", [("check",), ("set", "mtp.num_speculative_tokens=1"), ("diff",), ("offline",)])
def test_a_path_is_no_cluster(name: str, command: tuple[str, ...], copy: MakeCopy) -> None:
    found = copy("local")
    result = mtpctl(command[0], name, *command[1:], "--inventories", str(found.root))
    assert (result.exit_code, f"{name!r} names no inventory" in result.stderr) == (2, True), result.output


def test_a_folder_as_shells_complete_it_is_one(copy: MakeCopy) -> None:
    found = copy("local")
    assert "rules hold" in mtpctl("check", "local/", "--inventories", str(found.root)).stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mtp:\n", "mtp: Input should be keys with their values, found null."),
        ("mtp: [1]\n", "mtp: Input should be keys with their values, found [1]."),
        ("mtp:\n  enabled: 1\n  method: mtp\n", "mtp.enabled: Input should be a valid boolean, found 1."),
        ("mtp:\n  enabled: true\n  method: false\n", "mtp.method: Input should be a valid string, found false."),
    ],
)
def test_wrong_types_are_named_in_words_of_the_files(text: str, said: str, copy: MakeCopy) -> None:
    found = copy("local")
    found.file("mtp").write_text(text)
    assert said in mtpctl("check", "local", "--inventories", str(found.root)).stderr


@pytest.mark.parametrize(
    "words",
    [
        ("check", "local"),
        ("set-k", "local", "3"),
        ("set", "local", "mtp.num_speculative_tokens=2"),
        ("set", "local", "mtp.k=2"),
        ("diff", "local"),
        ("init", "mine", "--from", "nobody"),
    ],
)
def test_every_refusal_says_where_its_rule_comes_from(words: tuple[str, ...], copy: MakeCopy) -> None:
    found = copy("local")
    found.file("mtp").write_text("mtp:\n  enabled: [true\n")
    result = mtpctl(*words, "--inventories", str(found.root))
    assert (result.exit_code, "     source: docs/configuration.md\n" in result.stderr) == (2, True), result.stderr


def test_render_says_which_verification_runs_and_why(copy: MakeCopy) -> None:
    found = copy("local").edit({"mtp.draft_sampling": "probabilistic", "mtp.num_speculative_tokens": 2})
    shown = mtpctl("render", "local", "--inventories", str(found.root)).stdout
    assert "verification: block (auto: with draft probabilities and K = 2" in shown


@pytest.mark.parametrize("name", ["local", "a3"])
def test_render_shows_environment_and_command_lines_to_copy(name: str) -> None:
    """A shell reads one command back from the lines of a rank, and it is the plan's."""
    plan, shown = api.plan(name), mtpctl("render", name).stdout.splitlines()

    def words(*lines: str) -> list[str]:
        script = "\n".join(["show() { printf '%s\\0' \"$@\"; }", f"show {lines[0]}", *lines[1:]])
        done = subprocess.run(["sh", "-c", script], capture_output=True, check=True)
        return done.stdout.decode().split("\0")[:-1]

    def here(word: str) -> str:
        root = str(api.repository())
        marks = {"{engine_python}": f"{root}/.local/engine/bin/python", "{root}": root} if name == "local" else {}
        for mark, meaning in marks.items():
            word = word.replace(mark, meaning)
        return word

    for rank in (plan["ranks"][0], plan["ranks"][-1]):
        at = next(n for n, line in enumerate(shown) if line.startswith(f"{rank['name']} on {rank['host']}, "))
        assert rank["url"] in shown[at] and f"K = {rank['k']}" in shown[at]
        env = [f"{key}={value}" for key, value in rank["env"].items()]
        assert words(*shown[at + 1 : at + 3]) == [*map(here, ["env", *env, *rank["argv"]])]
    router = next(n for n, line in enumerate(shown) if line.startswith("router on "))
    assert words(shown[router + 1]) == [*map(here, plan["router"]["argv"])]
    assert any(line.startswith("{root}: this project's folder") for line in shown) == (name == "a3")


def test_check_says_what_it_could_not_check(copy: MakeCopy) -> None:
    """Rules that nothing could be said about do not count among those that hold."""

    def held(found: Copy) -> tuple[int, str]:
        shown = mtpctl("check", found.name, "--inventories", str(found.root)).stdout
        return int(shown.split(" rules hold")[0].split(": ")[-1]), shown

    local, a3 = held(copy("local")), held(copy("a3"))
    assert "not checked" not in local[1]
    assert "not checked here: W01, W02: /mnt/weights/DeepSeek-R1-W8A8-MTP/config.json is not on this machine" in a3[1]
    assert "mtpctl weights a3" in a3[1]
    left = held(copy("a3-single").edit({"serving.max_num_seqs": None}))
    assert left[0] == a3[0] - 1 and "not checked here: R06: max_num_seqs of single is left to the engine" in left[1]


def test_check_names_hosts_that_still_have_the_examples_addresses(copy: MakeCopy) -> None:
    """A copy made with init passes its check: the addresses are well-formed, but nobody has them."""
    found = copy("lab")
    where = ("--inventories", str(found.root))
    assert "still to edit" not in mtpctl("check", "lab", *where).stdout
    found.edit({"hosts.all.hosts.d0.address": "192.0.2.12"})
    assert (
        "still to edit: d0 in hosts.yml: an address of the documentation range" in mtpctl("check", "lab", *where).stdout
    )
    assert json.loads(mtpctl("check", "lab", "--json", *where).stdout)["examples"] == ["d0"]


def test_weights_on_another_machine_are_said_to_be_there(copy: MakeCopy) -> None:
    shown = mtpctl("check", "a3", "--inventories", str(copy("a3").edit({"mtp.num_speculative_tokens": None}).root))
    assert (
        "R44" in shown.stderr and "/mnt/weights/DeepSeek-R1-W8A8-MTP/config.json is not on this machine" in shown.stderr
    )


def test_render_says_which_padding_and_graphs_and_why(copy: MakeCopy) -> None:
    found = copy("local").edit({"serving.decode.graph_mode": "full", "mtp.padding": "slack"})
    shown = mtpctl("render", "local", "--inventories", str(found.root)).stdout
    assert "padding: slack (asked for by mtp.padding)" in shown
    assert "graphs: full, sizes 2, 4, 10 tokens" in shown
    eager = found.edit({"serving.decode.graph_mode": "eager"})
    assert "graphs: eager" in mtpctl("render", "local", "--inventories", str(eager.root)).stdout


# K, what config.json says -> the warning
WARNED = {1: None, 2: "W01", 3: "W02", 15: "W02"}


@pytest.mark.parametrize("k", WARNED)
def test_a_k_above_the_mtp_layers_warns_and_stops_nothing(k: int, copy: MakeCopy) -> None:
    found = copy("local").edit({"mtp.num_speculative_tokens": k})
    where = ("--inventories", str(found.root))
    result = mtpctl("check", "local", *where)
    assert result.exit_code == 0
    assert ("warning:" in result.stderr) == (WARNED[k] is not None)
    if WARNED[k]:
        assert f"{WARNED[k]}  warning: {found.file('mtp')}:" in result.stderr
        assert f"mtp.num_speculative_tokens: K = {k} with 1 MTP layer:" in result.stderr
        assert "remedy:" in result.stderr
    answer = json.loads(mtpctl("check", "local", "--json", *where).stdout)
    assert answer["ok"] is True
    assert [w["rule"] for w in answer["warnings"]] == ([WARNED[k]] if WARNED[k] else [])
    assert all(w["key"] == "mtp.num_speculative_tokens" and w["line"] > 0 for w in answer["warnings"])


def test_no_warning_without_a_reason(copy: MakeCopy) -> None:
    def warned(base: str, edits: dict[str, object]) -> list[str]:
        found = copy(base).edit(edits)
        rules = [w.rule for w in api.check(base, found.root).warnings]
        shutil.rmtree(found.folder)
        return rules

    assert warned("local", {"mtp.num_speculative_tokens": 3, "mtp.enabled": False}) == []
    assert warned("local", {"mtp.num_speculative_tokens": 3, "model.path": "no/such/folder"}) == []
    # Its weights are not on this machine.
    assert warned("a3", {"mtp.num_speculative_tokens": 3}) == []
    slack = {
        "mtp.padding": "slack",
        "serving.decode.additional_config.recompute_scheduler_enable": False,
        "serving.decode.compilation_config.cudagraph_capture_sizes": [86],
    }
    assert warned("a3", slack) == []
    assert warned("a3", {**slack, "topology.release": "0.18.0"}) == ["W03", "W04"]
    assert warned("local", {"mtp.padding": "slack"}) == []


def test_k_comes_from_the_weights_where_it_is_not_written(copy: MakeCopy, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    found = copy("local").edit({"mtp.num_speculative_tokens": DELETE, "model.path": str(weights)})
    where = ("--inventories", str(found.root))

    def answer(config: str | None) -> Result:
        (weights / "config.json").unlink(missing_ok=True)
        if config is not None:
            (weights / "config.json").write_text(config)
        return mtpctl("check", "local", *where)

    assert "MTP on, K = 1" in answer('{"num_nextn_predict_layers": 1}').stdout
    two = answer('{"num_nextn_predict_layers": 2}')
    assert ("K = 2" in two.stdout, "warning" in two.stderr) == (True, False)
    assert [rank["k"] for rank in api.plan("local", found.root)["ranks"]] == [1, 2]
    for config in (None, "{}", "[]", "{", '{"num_nextn_predict_layers": 0}', '{"num_nextn_predict_layers": true}'):
        refused = answer(config)
        assert (refused.exit_code, "R44" in refused.stderr) == (2, True), config
        assert "mtp.num_speculative_tokens" in refused.stderr and str(found.file("mtp")) in refused.stderr
    assert "R03" in answer('{"num_nextn_predict_layers": 16}').stderr
    assert mtpctl("set-k", "local", "3", *where).exit_code == 0
    assert api.load_checked("local", found.root).mtp.num_speculative_tokens == 3


def test_as_a_process() -> None:
    good = process("check", "local")
    assert (good.returncode, good.stderr) == (0, "")
    assert "MTP on, K = 1" in good.stdout
    bad = process("check", "no-such-cluster")
    assert bad.returncode == 2
    assert "C04" in bad.stderr and "local-single" in bad.stderr
    assert process("set-k", "local", "many").returncode == 2
    assert process("render", "../../etc").returncode == 2


def test_configuration_imports_no_engine() -> None:
    code = (
        "import sys, mtp_runtime.cli.app as m, mtp_runtime.config.api as a; a.plan('a3');"
        "print([n for n in ('torch', 'vllm', 'vllm_ascend', 'transformers') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=api.repository(), check=True
    )
    assert done.stdout.strip() == "[]"


def test_set_k_writes_and_keeps_comments(copy: MakeCopy) -> None:
    found = copy("local")
    before = found.content()
    found.file("mtp").chmod(0o640)
    result = mtpctl("set-k", "local", "3", "--inventories", str(found.root))
    assert result.exit_code == 0, result.output
    after = found.content()
    assert [name for name in after if after[name] != before[name]] == ["group_vars/all/mtp.yml"]
    assert set(after) == set(before)
    text = after["group_vars/all/mtp.yml"].decode()
    assert text == before["group_vars/all/mtp.yml"].decode().replace("tokens: 1", "tokens: 3")
    assert found.file("mtp").stat().st_mode & 0o777 == 0o640
    again = mtpctl("set-k", "local", "3", "--inventories", str(found.root))
    assert "unchanged" in again.output


def test_another_k_can_be_looked_at_without_writing_it(copy: MakeCopy) -> None:
    found = copy("local").edit({"mtp.num_speculative_tokens": 16})
    before, where = found.content(), ("--inventories", str(found.root))
    assert mtpctl("check", "local", *where).exit_code == 2
    assert "MTP on, K = 3" in mtpctl("check", "local", "--k", "3", *where).stdout
    plan = json.loads(mtpctl("render", "local", "--json", "--k", "3", *where).stdout)
    assert [rank["k"] for rank in plan["ranks"]] == [1, 3]
    refused = mtpctl("render", "local", "--json", "--k", "17", *where)
    assert (refused.exit_code, "R03" in refused.stderr) == (2, True)
    assert mtpctl("weights", "local", "--k", "2", *where).exit_code == 0
    assert found.content() == before


def test_set_k_zero_switches_off_and_back(copy: MakeCopy) -> None:
    found = copy("local").edit({"mtp.num_speculative_tokens": 2})
    mtpctl("set-k", "local", "0", "--inventories", str(found.root))
    mtp = api.load_checked("local", found.root).mtp
    assert (mtp.enabled, mtp.num_speculative_tokens) == (False, 2)
    mtpctl("set-k", "local", "2", "--inventories", str(found.root))
    mtp = api.load_checked("local", found.root).mtp
    assert (mtp.enabled, mtp.num_speculative_tokens) == (True, 2)


@pytest.mark.parametrize(("k", "rule"), [("16", "R03"), ("-1", None), ("1000", "R03"), ("99999999999", "C03")])
def test_set_k_refuses_and_changes_nothing(k: str, rule: str | None, copy: MakeCopy) -> None:
    found = copy("local")
    before = found.content()
    result = mtpctl("set-k", "local", "--inventories", str(found.root), "--", k)
    assert result.exit_code == 2, result.output
    if rule:
        assert rule in result.stderr
        assert str(found.file("mtp")) in result.stderr
    assert found.content() == before


def test_set_k_repairs_a_bad_k(copy: MakeCopy) -> None:
    found = copy("local").edit({"mtp.num_speculative_tokens": 16})
    assert mtpctl("set-k", "local", "2", "--inventories", str(found.root)).exit_code == 0
    assert api.load_checked("local", found.root).mtp.num_speculative_tokens == 2


def test_set_k_refuses_when_another_file_is_wrong(copy: MakeCopy) -> None:
    found = copy("local").edit({"topology.decode.port": 8200})
    before = found.content()
    result = mtpctl("set-k", "local", "2", "--inventories", str(found.root))
    assert result.exit_code == 2
    assert "R30" in result.stderr
    assert found.content() == before


def test_set_k_leaves_the_old_file_when_the_disk_refuses(
    copy: MakeCopy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = copy("local")
    before = found.content()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", str(found.file("mtp")))

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(sys, "argv", ["mtpctl", "set-k", "local", "2", "--inventories", str(found.root)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    shown = capsys.readouterr().err
    assert "No space left on device" in shown and "Traceback" not in shown
    assert found.content() == before


def test_unknown_key_names_the_likely_one(copy: MakeCopy) -> None:
    found = copy("local").edit({"mtp.num_speculativ_tokens": 2, "topology.decode.x": 1, "hosts.all.children.x": {}})
    shown = mtpctl("check", "local", "--inventories", str(found.root)).stderr
    assert "did you mean num_speculative_tokens?" in shown
    assert "valid: dp, tp, port" in shown
    assert "valid: prefill, decode, single, router, monitoring" in shown


@pytest.mark.parametrize(
    "text", ["[" * 3000, "a: " * 3000, "&a [*a, *a]", "mtp: !!python/object:os.system x", "\0", "%"]
)
def test_hostile_yaml(text: str, copy: MakeCopy) -> None:
    found = copy("local")
    found.file("mtp").write_text(text)
    answers(found)
    assert "mtp.yml" in mtpctl("check", "local", "--inventories", str(found.root)).stderr


def test_unreadable_and_binary_files(copy: MakeCopy) -> None:
    found = copy("local")
    found.file("mtp").write_bytes(b"\xff\xfe\x00mtp")
    found.file("model").unlink()
    found.file("model").mkdir()
    found.file("serving").write_text(
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(
            f"{name}: &{name} [{', '.join(['*' + old] * 9)}]\n" for old, name in zip("abcdefg", "bcdefgh", strict=True)
        )
    )
    result = mtpctl("check", "local", "--inventories", str(found.root))
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert {section for section in ("mtp", "model", "serving") if str(found.file(section)) in result.stderr} == {
        "mtp",
        "model",
        "serving",
    }


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.text(max_size=12),
    st.dates().map(str),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(st.text(max_size=8), st.integers()), inner, max_size=3)
    ),
    max_leaves=6,
)
# base inventory -> keys whose values are replaced
KEYS = {
    "local": """
        mtp mtp.enabled mtp.num_speculative_tokens mtp.method mtp.verification mtp.draft_sampling model.max_model_len
        mtp.attention mtp.padding serving.graph_mode serving.decode.graph_mode serving.decode.compilation_config
        model.num_hidden_layers model.dtype model.path topology topology.engine topology.release topology.connector
        topology.decode topology.decode.dp topology.decode.tp topology.decode.port topology.devices_per_host
        topology.single serving.max_num_seqs serving.kv_cache_bytes serving.decode serving.additional_config
        serving.compilation_config serving.router serving.router.port monitoring.prometheus_port hosts.all
        hosts.all.hosts hosts.all.hosts.localhost hosts.all.hosts.localhost.address hosts.all.children
        hosts.all.children.decode
    """,
    "a3": """
        mtp.num_speculative_tokens mtp.draft_model topology.devices_per_host topology.prefill.dp topology.prefill.tp
        topology.decode.dp topology.decode.tp topology.decode.rpc_port serving.decode.gpu_memory_utilization
        serving.decode.max_num_seqs serving.decode.compilation_config.cudagraph_capture_sizes
        serving.decode.additional_config.finegrained_tp_config hosts.all.hosts.p0.kv_port hosts.all.hosts.d1
        hosts.all.children.decode.hosts hosts.all.children.prefill.hosts
    """,
}
CHOICES = [(base, key) for base, keys in KEYS.items() for key in keys.split()]
# Small numbers are the interesting ones: they are mostly in range, so the rules see them.
LIKELY = st.one_of(st.integers(0, 70), st.sampled_from([36000, 65535, 8200, "auto", "mtp", None, [2, 4]]), VALUES)


def dumped(value: object) -> str:
    """The value as a YAML file of its own."""
    out = io.StringIO()
    YAML(typ="safe").dump(value, out)
    return out.getvalue()


def answers(found: Copy) -> None:
    """check answers 0 or 2 and never with a traceback; what it lets through can be rendered and started."""
    where = ("--inventories", str(found.root))
    result = mtpctl("check", found.name, *where)
    assert result.exit_code in (0, 2), (result.output, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    if result.exit_code == 2:
        assert "remedy:" in result.stderr
        return
    plan = json.loads(mtpctl("render", found.name, "--json", *where).stdout)
    assert plan["ranks"]
    for rank in plan["ranks"]:
        words = [*rank["argv"], *rank["env"], *rank["env"].values()]
        assert all(isinstance(word, str) and word.isprintable() and word != "None" for word in words)
        assert 0 <= rank["k"] <= 15


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(choice=st.sampled_from(CHOICES), value=LIKELY)
def test_any_value_is_answered_without_a_traceback(choice: tuple[str, str], value: object, tmp_path: Path) -> None:
    base, key = choice
    shutil.rmtree(tmp_path / base, ignore_errors=True)
    shutil.copytree(api.inventories() / base, tmp_path / base)
    found = Copy(tmp_path, base)
    section, *rest = key.split(".")
    data = YAML(typ="safe").load(found.file(section).read_text())
    path = rest if section == "hosts" else [section, *rest]
    node = data
    for part in path[:-1]:
        node = node.setdefault(part, {})
    node[path[-1]] = value
    found.file(section).write_text(dumped(data))
    answers(found)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(section=st.sampled_from(["hosts", "mtp", "topology"]), text=st.text(max_size=60), at=st.floats(0, 1))
def test_any_text_is_answered_without_a_traceback(section: str, text: str, at: float, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "local", ignore_errors=True)
    shutil.copytree(api.inventories() / "local", tmp_path / "local")
    found = Copy(tmp_path, "local")
    old = found.file(section).read_text()
    cut = int(at * len(old))
    found.file(section).write_text(old[:cut] + text.encode("utf-8", "replace").decode() + old[cut:])
    answers(found)
