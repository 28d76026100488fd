"""`mtpctl diff`: what a change means, against a git revision or what is deployed."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inventory_copy import DELETE, Copy
from typer.testing import CliRunner, Result

from mtp_runtime.cli import diff as command
from mtp_runtime.cli.main import app
from mtp_runtime.config import api
from mtp_runtime.config.arguments import engine_arguments
from mtp_runtime.config.effects import expected_length, rate_of, size
from mtp_runtime.config.impact import compare
from mtp_runtime.config.problems import ConfigError
from mtp_runtime.config.revision import at_revision

MakeCopy = Callable[[str], Copy]
K = "mtp.num_speculative_tokens"
VAULT = "!vault |\n          $ANSIBLE_VAULT;1.1;AES256\n          6638643965323633{}\n"


def git(folder: Path, *words: str) -> str:
    identity = {"GIT_AUTHOR_NAME": "t", "GIT_AUTHOR_EMAIL": "t@example.org", "GIT_CONFIG_GLOBAL": "/dev/null"}
    identity |= {"GIT_COMMITTER_NAME": "t", "GIT_COMMITTER_EMAIL": "t@example.org", "GIT_CONFIG_SYSTEM": "/dev/null"}
    done = subprocess.run(["git", *words], cwd=folder, env={**os.environ, **identity}, capture_output=True, check=True)
    return done.stdout.decode().strip()


def commit(found: Copy, message: str = "one") -> str:
    """Everything in a commit; the repository is made for the first one."""
    if not (found.root / ".git").exists():
        git(found.root, "init", "-q", "-b", "main")
    git(found.root, "add", "-A")
    git(found.root, "commit", "-q", "-m", message)
    return git(found.root, "rev-parse", "HEAD")


def diff(found: Copy, *words: str) -> Result:
    return CliRunner().invoke(app, ["diff", found.name, *words, "--inventories", str(found.root)])


def answer(found: Copy, *words: str) -> dict[str, Any]:
    result = diff(found, *words, "--json")
    assert result.exit_code == 0, result.stderr
    return dict(json.loads(result.stdout))


def actions(found: dict[str, Any]) -> dict[str, list[str]]:
    """action -> ranks."""
    out: dict[str, list[str]] = {}
    for rank in found["ranks"]:
        out.setdefault(rank["action"], []).append(rank["name"])
    return out


def settings(found: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {one["name"]: (one["old"], one["new"]) for one in found["settings"]}


@pytest.fixture
def committed(copy: MakeCopy) -> MakeCopy:
    """A copy that is in its own git repository."""

    def make(name: str) -> Copy:
        found = copy(name)
        commit(found)
        return found

    return make


def test_nothing_changed(committed: MakeCopy) -> None:
    found = committed("local")
    result = diff(found)
    assert result.exit_code == 0
    assert result.stdout.startswith("local: nothing differs from HEAD (")
    found.file("mtp").write_text("# only a comment\n" + found.file("mtp").read_text())
    assert "nothing differs" in diff(found).stdout
    assert answer(found)["changed"] is False


def test_k_from_1_to_3(committed: MakeCopy) -> None:
    found = committed("local")
    before = api.plan("local", found.root)
    found.edit({K: 3})
    after = api.plan("local", found.root)
    told = answer(found)
    assert told["changed"] is True and told["cluster"] == "local"
    assert [(one["key"], one["old"], one["new"]) for one in told["keys"]] == [(K, "1", "3")]
    assert told["keys"][0]["file"] == str(found.file("mtp")) and told["keys"][0]["line"] == 8
    assert actions(told) == {"unchanged": ["prefill-0"], "restart": ["decode-0"]}
    reasons = next(rank["reasons"] for rank in told["ranks"] if rank["name"] == "decode-0")
    assert "speculative_config.num_speculative_tokens 1 -> 3" in reasons
    assert told["services"] == {}
    changed = settings(told)
    assert changed["K"] == (1, 3)
    assert changed["graph sizes, tokens"] == (before["graphs"]["capture_sizes"], after["graphs"]["capture_sizes"])
    kv = [engine_arguments(plan["ranks"][1]["argv"])["kv_cache_memory_bytes"] for plan in (before, after)]
    assert changed.get("KV memory of a decode rank, bytes", (kv[0], kv[0])) == (kv[0], kv[1])
    told_text = " ".join(told["effects"])
    assert (
        "a request verifies 4 tokens a step instead of 2 (+2), and the drafter runs 3 times instead of 1" in told_text
    )
    assert "expected acceptance length 1.85 -> 3.19 tokens a step, if a draft is accepted with 85%" in told_text
    assert "less than 1.72 times" in told_text
    assert "1 of 2 ranks stop or restart; requests that run on them end." in told_text
    shown = diff(found)
    assert "restart: decode-0 (" in shown.stdout and "unchanged: prefill-0" in shown.stdout
    assert "W02" in shown.stderr, "what check warns of is said here too"
    assert "expected acceptance length 1.90 -> 3.44" in diff(found, "--acceptance", "0.9").stdout


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("local", "MTP goes off on every rank, prefill and decode alike: the KV of the drafter's layer"),
        ("local-single", "MTP goes off on every rank."),
    ],
)
def test_switching_off_names_the_roles_there_are(name: str, said: str, copy: MakeCopy) -> None:
    found = copy(name)
    commit(found)
    assert said in diff(found.edit({"mtp.enabled": False})).stdout


def test_one_drafter_run_is_one_time(copy: MakeCopy) -> None:
    found = copy("local").edit({K: 2})
    commit(found)
    assert "the drafter runs 1 time instead of 2." in diff(found.edit({K: 1})).stdout


def test_mtp_off_restarts_both_sides(committed: MakeCopy) -> None:
    found = committed("local").edit({"mtp.enabled": False})
    told = answer(found)
    assert actions(told) == {"restart": ["prefill-0", "decode-0"]}
    assert settings(told)["MTP"] == ("on", "off") and settings(told)["K"] == (1, 0)
    assert settings(told)["padding"] == ("placeholder", None)
    text = " ".join(told["effects"])
    assert "MTP goes off on every rank" in text
    assert "K 1 -> 0: a request verifies 1 token a step instead of 2 (-1)" in text
    assert "less than 0.54 times" in text
    kv = settings(told)["KV memory of a decode rank, bytes"]
    assert kv[1] < kv[0] and f"KV memory of a decode rank {size(kv[0])} -> {size(kv[1])} (-" in text


@pytest.mark.parametrize(
    ("edits", "setting", "said"),
    [
        ({"mtp.padding": "slack"}, ("padding", "placeholder", "slack"), "padding: slack (asked for by mtp.padding)."),
        (
            {K: 2, "mtp.draft_sampling": "probabilistic"},
            ("verification", "tokenwise", "block"),
            "verification: block (auto: with draft probabilities and K = 2",
        ),
        ({"serving.decode.graph_mode": "eager"}, ("graph mode", "full", "eager"), "decode steps run eagerly"),
        ({"serving.decode.graph_mode": "piecewise"}, ("graph mode", "full", "piecewise"), "graphs (piecewise) of 2,"),
        ({"serving.decode.max_num_seqs": 8}, ("requests in a batch", 4, 8), "graphs (full) of 2, 4, 8, 16 tokens."),
        ({"mtp.attention": "batch_expansion"}, ("attention", "tnd", "batch_expansion"), "1 of 2 ranks"),
        ({"model.name": "other"}, ("model", "tiny-deepseek-v3", "other"), "clients ask for model other instead of"),
    ],
)
def test_settings_of_a_step(
    edits: dict[str, Any], setting: tuple[str, Any, Any], said: str, committed: MakeCopy
) -> None:
    told = answer(committed("local").edit(edits))
    name, old, new = setting
    assert settings(told)[name] == (old, new)
    assert said in " ".join(told["effects"])


def test_a_default_that_is_written_out_changes_nothing(committed: MakeCopy) -> None:
    found = committed("local").edit({"serving.decode.max_num_seqs": 4})
    shown = diff(found).stdout
    assert "serving.decode.max_num_seqs: (not written) -> 4" in shown
    assert "No program restarts and no setting changes." in shown


def test_the_way_in_and_monitoring(committed: MakeCopy) -> None:
    found = committed("local").edit({"serving.router.port": 8005, "monitoring.prometheus_port": 9095})
    told = answer(found)
    assert actions(told) == {"unchanged": ["prefill-0", "decode-0"]}
    assert set(told["services"]) == {"front", "monitoring"}
    assert told["services"]["front"] == ["address.port 8000 -> 8005"]
    text = " ".join(told["effects"])
    assert "clients find it at http://127.0.0.1:8005/v1 now." in text and "every request in flight ends" in text
    told = answer(found.edit({"serving.router.policy": "random", "topology.decode.port": 8301}))
    assert set(told["services"]) == {"router", "front", "monitoring"}
    assert told["services"]["router"] == [
        "command line: round_robin http://127.0.0.1:8300 -> random http://127.0.0.1:8301"
    ]
    assert actions(told) == {"unchanged": ["prefill-0"], "restart": ["decode-0"]}


def test_a_group_of_ranks_restarts_as_a_whole_on_ascend(committed: MakeCopy) -> None:
    found = committed("a3").edit({"hosts.all.hosts.d1.kv_port": 36300})
    told = answer(found)
    assert actions(told) == {
        "unchanged": [f"prefill-{n}" for n in range(4)],
        "restart": [f"decode-{n}" for n in range(16, 32)],
        "restart with its group": [f"decode-{n}" for n in range(16)],
    }
    assert "restarts as a whole" in " ".join(told["effects"])
    shown = diff(found).stdout
    assert "restart: decode-16..31 (kv_transfer_config.kv_port 36200 -> 36300)" in shown
    assert "restart with its group: decode-0..15" in shown and "unchanged: prefill-0..3" in shown


def test_ranks_come_and_go(committed: MakeCopy) -> None:
    found = committed("a3").edit({"hosts.all.children.prefill.hosts": {"p0": None}, "hosts.all.hosts.p1": DELETE})
    told = answer(found)
    assert actions(told)["stop"] == ["prefill-2", "prefill-3"]
    assert settings(told)["ranks of prefill"] == (4, 2)
    commit(found, "two")
    back = answer(found, "HEAD~1")
    assert actions(back)["stop"] == ["prefill-2", "prefill-3"]
    git(found.root, "checkout", "-q", "HEAD~1")
    assert actions(answer(found, "main"))["start"] == ["prefill-2", "prefill-3"]


def test_vaulted_values_are_compared_and_not_shown(committed: MakeCopy) -> None:
    found = committed("a3")
    text = found.file("hosts").read_text()
    for number in ("00", "11"):
        vaulted = text.replace("      nic: eth0\n", f"      nic: eth0\n      ansible_user: {VAULT.format(number)}", 1)
        found.file("hosts").write_text(vaulted)
        told = answer(found)
        assert [(one["key"], one["new"]) for one in told["keys"]] == [("all.hosts.p0.ansible_user", "(vaulted)")]
        assert told["changed"] is False
        shown = diff(found)
        assert "(not written) -> (vaulted)" in shown.stdout or "(vaulted) -> (vaulted)" in shown.stdout
        assert "6638643965323633" not in shown.output + json.dumps(told)
        commit(found, number)
        assert answer(found)["keys"] == []


@pytest.mark.parametrize("revision", ["HEAD", "HEAD~1", "main", "v1", "main~1"])
def test_revisions(revision: str, copy: MakeCopy) -> None:
    found = copy("local")
    first = commit(found)
    git(found.root, "tag", "v1")
    commit(found.edit({K: 2}), "two")
    old = 1 if revision in ("HEAD~1", "v1", "main~1") else 2
    assert settings(answer(found.edit({K: 3}), revision))["K"] == (old, 3)
    assert settings(answer(found, first))["K"] == (1, 3)
    assert settings(answer(found, first[:8]))["K"] == (1, 3)


@pytest.mark.parametrize(
    "revision",
    [
        "nope",
        "",
        " ",
        "HEAD~9",
        "-q",
        "--help",
        "a b",
        "HEAD:x",
        "HEAD^{tree}",
        "\udcff",
        "x" * 5000,
        "..",
        "@{u}",
        "é",
    ],
)
def test_a_bad_revision_is_refused(revision: str, committed: MakeCopy) -> None:
    found = committed("local")
    with pytest.raises(ConfigError) as refused:
        at_revision("local", revision, found.root)
    (problem,) = refused.value.problems
    assert (problem.rule, problem.file, problem.key) == ("C08", "command line", "REV")
    assert "is no revision of this checkout" in problem.message and len(problem.message) < 500
    if revision.isprintable() and revision:
        result = CliRunner().invoke(app, ["diff", "--inventories", str(found.root), "--json", "--", "local", revision])
        assert result.exit_code == 2 and json.loads(result.stdout)["problems"][0]["key"] == "REV"


def test_outside_a_checkout(copy: MakeCopy, monkeypatch: pytest.MonkeyPatch) -> None:
    found = copy("local")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(found.root.parent))
    result = diff(found)
    assert (result.exit_code, "is no git checkout" in result.stderr) == (2, True)
    assert "--deployed" in result.stderr
    commit(found)
    assert diff(found).exit_code == 0
    monkeypatch.setenv("PATH", str(found.root))
    result = diff(found)
    assert (result.exit_code, "is no git checkout" in result.stderr) == (2, True)


def test_a_repository_without_a_commit(copy: MakeCopy) -> None:
    found = copy("local")
    git(found.root, "init", "-q")
    result = diff(found)
    assert (result.exit_code, "there is no commit yet" in result.stderr) == (2, True)


def test_an_inventory_that_was_not_there_or_was_refused(committed: MakeCopy) -> None:
    found = committed("local")
    other = Copy(found.root, "other")
    other.folder.mkdir()
    for name, content in found.content().items():
        (other.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (other.folder / name).write_bytes(content)
    result = diff(other)
    assert result.exit_code == 2
    assert "C08  command line: CLUSTER: inventory other is not in HEAD yet" in result.stderr
    assert f"remedy: commit it (git add {other.folder}, git commit)" in result.stderr
    commit(other.edit({K: 16}), "two")
    result = diff(other.edit({K: 1}))
    assert result.exit_code == 2
    assert "the inventory of HEAD does not pass the check of this version" in result.stderr
    assert "R03" in result.stderr and "HEAD:other/group_vars/all/mtp.yml" in result.stderr
    other.file("mtp").unlink()
    commit(other, "three")
    other.file("mtp").write_bytes(found.file("mtp").read_bytes())
    result = diff(other)
    assert "C04" in result.stderr and "HEAD:other/group_vars/all/mtp.yml: (file): the file is missing" in result.stderr


def test_a_broken_inventory_is_refused(committed: MakeCopy) -> None:
    found = committed("local").edit({K: 16})
    result = diff(found)
    assert (result.exit_code, "R03" in result.stderr) == (2, True)
    assert CliRunner().invoke(app, ["diff", "nobody", "--inventories", str(found.root)]).exit_code == 2


def test_odd_bytes_of_a_revision_and_an_untouched_repository(tmp_path: Path, copy: MakeCopy) -> None:
    found = copy("local")
    root = tmp_path / "ein Ordner mit 空格"
    root.mkdir()
    (root / "inventories").mkdir()
    found.folder.rename(root / "inventories" / "local")
    moved = Copy(root / "inventories", "local")
    moved.file("mtp").write_bytes(b"\xef\xbb\xbf" + moved.file("mtp").read_bytes().replace(b"\n", b"\r\n"))
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "one")
    moved.file("mtp").write_bytes(moved.file("mtp").read_bytes().replace(b"tokens: 1", b"tokens: 2"))
    index = (root / ".git/index").read_bytes()
    assert [(one["key"], one["old"], one["new"]) for one in answer(moved)["keys"]] == [(K, "1", "2")]
    assert (root / ".git/index").read_bytes() == index
    moved.file("model").write_bytes(b"\xff" * (1 << 19))
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "two")
    moved.file("model").write_bytes((api.inventories() / "local/group_vars/all/model.yml").read_bytes())
    assert "larger than" in diff(moved).stderr


# What is deployed on this machine.


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state folder of a deployed cluster."""
    folder = tmp_path / "state"
    (folder / "reports").mkdir(parents=True)
    monkeypatch.setattr(command, "_state", lambda cluster: folder)
    return folder


def test_against_what_is_deployed(copy: MakeCopy, state: Path) -> None:
    found = copy("local")
    (state / "plan.json").write_text(json.dumps(api.plan("local", found.root)))
    assert diff(found, "--deployed").stdout == "local: nothing differs from what is deployed\n"
    told = answer(found.edit({K: 3}), "--deployed")
    assert (told["against"], told["keys"], settings(told)["K"]) == ("what is deployed", [], (1, 3))
    (state / "reports/canary.json").write_text(json.dumps({"mtp": "on, K = 1", "acceptance_length": 1.92}))
    text = " ".join(answer(found, "--deployed")["effects"])
    assert "1.92 -> 3.55" in text and "as the last canary here" in text
    (state / "reports/canary.json").write_text(json.dumps({"mtp": "on, K = 2", "acceptance_length": 1.92}))
    assert "the figure of the MTP article" in " ".join(answer(found, "--deployed")["effects"])
    refused = diff(found, "HEAD", "--deployed")
    assert (refused.exit_code, "give one of the two" in refused.stderr) == (2, True)


def test_a_plan_of_an_earlier_version(copy: MakeCopy, state: Path) -> None:
    found = copy("local")
    plan = api.plan("local", found.root)
    for name in ("padding", "graphs", "verification", "deployable", "runner"):
        plan.pop(name, None)
    plan["ranks"][1]["argv"] += ["--flag-of-old", "x"]
    (state / "plan.json").write_text(json.dumps(plan))
    told = answer(found, "--deployed")
    assert actions(told) == {"unchanged": ["prefill-0"], "restart": ["decode-0"]}
    assert settings(told)["padding"] == (None, "placeholder")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "1", '{"ranks": 1}', '{"ranks": [{}]}', "\udcff", "[" * 9999])
def test_a_deployed_plan_that_cannot_be_read(content: str, copy: MakeCopy, state: Path) -> None:
    (state / "plan.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    result = diff(copy("local"), "--deployed")
    assert (result.exit_code, "the deployed plan cannot be read" in result.stderr) == (2, True), result.output
    assert "make deploy CLUSTER=local" in result.stderr


def test_nothing_is_deployed(copy: MakeCopy, state: Path) -> None:
    result = diff(copy("local"), "--deployed")
    assert (result.exit_code, "local is not deployed on this machine" in result.stderr) == (2, True)
    assert "mtpctl diff local HEAD" in result.stderr


@given(st.floats(0.01, 0.99), st.integers(1, 15))
def test_acceptance_rate_and_length_are_inverse(rate: float, k: int) -> None:
    length = expected_length(rate, k)
    assert 1 < length < k + 1
    assert abs(rate_of(length, k) - rate) < 1e-6
    assert expected_length(rate, k + 1) >= length


def test_every_shipped_plan_compares_with_every_other() -> None:
    names = [p.name for p in api.inventories().iterdir() if (p / "hosts.yml").is_file()]
    plans = {name: api.plan(name) for name in names}
    for old in names:
        for new in names:
            impact = compare(plans[old], plans[new])
            assert impact.changed == (old != new)


def test_monitoring_counts_its_targets(committed: MakeCopy) -> None:
    """It looks at every rank: a line with all of them could not be read."""
    found = committed("a3")
    found.edit(
        {
            "hosts.all.hosts.d2": {"ansible_host": "192.0.2.23", "address": "192.0.2.23", "nic": "eth0"},
            "hosts.all.children.decode.hosts": {"d0": None, "d1": None, "d2": None},
            "topology.decode.dp": 48,
        }
    )
    shown = diff(found).stdout
    (line,) = [line for line in shown.splitlines() if "restart: monitoring" in line]
    assert line == "  restart: monitoring (16 targets added, 0 removed)"
    assert "{'" not in shown
