"""`mtpctl set`: one value changes, every other byte stays; all assignments or none."""

import json
import multiprocessing
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inventory_copy import Copy
from typer.testing import CliRunner, Result

from mtp_runtime.cli.main import app
from mtp_runtime.config import api, document, edit, nodes, store
from mtp_runtime.config.assign import all_keys
from mtp_runtime.config.problems import ConfigError
from mtp_runtime.config.text_edit import REMOVED, Unplaceable, put

MakeCopy = Callable[[str], Copy]
K = "mtp.num_speculative_tokens"
VAULT = "!vault |\n          $ANSIBLE_VAULT;1.1;AES256\n          6638643965323633\n"


def mtpctl(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def assign(found: Copy, *words: str) -> Result:
    return mtpctl("set", found.name, *words, "--inventories", str(found.root))


def changed_lines(before: bytes, after: bytes) -> list[tuple[str, str]]:
    """Lines that differ, of two texts with the same number of lines."""
    pairs = zip(before.decode().splitlines(), after.decode().splitlines(), strict=True)
    return [(old.strip(), new.strip()) for old, new in pairs if old != new]


def test_values_change_and_nothing_else(copy: MakeCopy) -> None:
    found = copy("local")
    found.file("mtp").chmod(0o640)
    before = found.content()
    result = assign(found, f"{K}=2", "mtp.padding=slack", "serving.decode.graph_mode=piecewise", "model.name=tiny")
    assert result.exit_code == 0, result.stderr
    assert f"{found.file('mtp')}: {K}: 1 -> 2" in result.stdout
    assert "mtpctl diff local" in result.stdout
    after = found.content()
    assert set(after) == set(before)
    assert {name: changed_lines(before[name], after[name]) for name in after if after[name] != before[name]} == {
        "group_vars/all/mtp.yml": [
            ("num_speculative_tokens: 1", "num_speculative_tokens: 2"),
            ("padding: auto", "padding: slack"),
        ],
        "group_vars/all/serving.yml": [("graph_mode: full", "graph_mode: piecewise")],
        "group_vars/all/model.yml": [("name: tiny-deepseek-v3", "name: tiny")],
    }
    assert found.file("mtp").stat().st_mode & 0o777 == 0o640
    assert assign(found, f"{K}=2").stdout == "local: unchanged\n"


def test_bytes_of_other_editors_stay(copy: MakeCopy) -> None:
    found = copy("local")
    text = b"\xef\xbb\xbf# \xe5\xa4\x9a\xe4\xbb\xa4\xe7\x89\x8c\r\n" + found.file("mtp").read_bytes().replace(
        b"\n", b"\r\n"
    )
    found.file("mtp").write_bytes(text)
    assert assign(found, f"{K}=3", "mtp.disable_padded_drafter_batch=false").exit_code == 0
    wanted = text.replace(b"tokens: 1\r\n", b"tokens: 3\r\n") + b"  disable_padded_drafter_batch: false\r\n"
    assert found.file("mtp").read_bytes() == wanted
    assert mtpctl("set-k", "local", "1", "--inventories", str(found.root)).exit_code == 0
    assert found.file("mtp").read_bytes() == wanted.replace(b"tokens: 3", b"tokens: 1")


def test_a_key_comes_and_goes(copy: MakeCopy) -> None:
    found = copy("local")
    before = found.content()
    sizes = "serving.decode.compilation_config.cudagraph_capture_sizes"
    assert assign(found, f"{sizes}=2,8").exit_code == 0
    assert "    compilation_config:\n      cudagraph_capture_sizes: [2, 8]\n" in found.file("serving").read_text()
    again = assign(found, f"{sizes}=[2, 4, 8]", "--json")
    assert json.loads(again.stdout)["changes"] == [
        {"file": str(found.file("serving")), "key": sizes, "old": "[2, 8]", "new": "[2, 4, 8]"}
    ]
    gone = assign(found, "serving.decode.compilation_config=")
    assert "{cudagraph_capture_sizes: [2, 4, 8]} -> (not written)" in gone.stdout
    assert found.content() == before


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("topology.release=0.32.0", 'release: "0.32.0"'),
        ("model.name=true", 'name: "true"'),
        ("model.name=12", 'name: "12"'),
        ("model.name='12'", 'name: "12"'),
        ("model.path=/weights of ours/R1#2", 'path: "/weights of ours/R1#2"'),
        ("model.path=/权重/R1: w8a8", 'path: "/权重/R1: w8a8"'),
        ("mtp.draft_model=null", "draft_model: null"),
        ("serving.kv_cache_bytes=500000000", "kv_cache_bytes: 500000000"),
        ("serving.decode.prefix_caching=false", "prefix_caching: false"),
        ("mtp.num_speculative_tokens=0x2", "num_speculative_tokens: 2"),
        ("all.hosts.localhost.ansible_user=root", "ansible_user: root"),
        ("all.hosts.localhost.ansible_port= 22", "ansible_port: 22"),
    ],
)
def test_the_schema_decides_the_type(word: str, line: str, copy: MakeCopy) -> None:
    found = copy("local")
    result = assign(found, word)
    assert result.exit_code == 0, result.stderr
    lines = [one.strip() for one in b"".join(found.content().values()).decode().splitlines()]
    assert line in lines


def test_a_share_of_memory_is_written_as_every_reader_reads_it(copy: MakeCopy) -> None:
    found = copy("a3")
    for text, written in (("0.5", "0.5"), ("0.00001", "0.000010"), (".25", "0.25")):
        assert assign(found, f"serving.decode.gpu_memory_utilization={text}").exit_code == 0
        assert f"    gpu_memory_utilization: {written}\n" in found.file("serving").read_text()
        assert api.load_checked("a3", found.root).serving.decode.gpu_memory_utilization == float(text)  # type: ignore[union-attr]


# word(s) -> rule, key, what is said
REFUSED = {
    ("mtp.num_speculativ_tokens=2",): ("C01", "mtp.num_speculativ_tokens", "did you mean mtp.num_speculative_tokens"),
    ("num_speculative_tokens=2",): ("C01", "num_speculative_tokens", "did you mean mtp.num_speculative_tokens?"),
    ("mtp.k=2",): ("C01", "mtp.k", "mtp has: enabled, num_speculative_tokens"),
    ("nothing=2",): ("C01", "nothing", "keys begin with model, topology"),
    ("name=2",): ("C01", "name", "did you mean model.name?"),
    ("hosts.all.hosts.localhost.address=127.0.0.1",): (
        "C01",
        "hosts.all.hosts.localhost.address",
        "did you mean all.hosts.localhost.address?",
    ),
    ("mtp..k=2",): ("C01", "mtp..k", "unknown key"),
    ("=2",): ("C02", "=2", "no assignment"),
    ("mtp.enabled",): ("C02", "mtp.enabled", "no assignment"),
    (f"{K}=two",): ("C02", K, 'valid integer, found "two"'),
    (f"{K}='2'",): ("C02", K, 'valid integer, found "2"'),
    (f"{K}=1.5",): ("C02", K, "valid integer"),
    (f"{K}=010",): ("C02", K, 'valid integer, found "010"'),
    ("mtp.enabled=yes",): ("C02", "mtp.enabled", "booleans are true and false"),
    ("mtp.enabled=1",): ("C02", "mtp.enabled", "valid boolean, found 1"),
    ("mtp.enabled=",): ("C07", "mtp.enabled", "the key is missing"),
    (f"{K}=16",): ("R03", K, "17 query tokens"),
    (f"{K}=99999999999",): ("C03", K, "less than or equal"),
    ("mtp.method=mpt",): ("R19", "mtp.method", "unknown method 'mpt'"),
    ("mtp={enabled: true}",): ("C02", "mtp", "group of keys: enabled, num_speculative_tokens"),
    ("serving.decode=3",): ("C02", "serving.decode", "group of keys"),
    ("all.hosts=x",): ("C02", "all.hosts", "group of keys"),
    ("mtp.enabled.x=1",): ("C01", "mtp.enabled.x", "unknown key"),
    ("all.hosts.lokalhost.nic=eth0",): ("C01", "all.hosts.lokalhost.nic", "did you mean localhost?"),
    ("all.hosts.localhost.nick=eth0",): ("C01", "all.hosts.localhost.nick", "all.hosts.HOST.nic"),
    ("all.children.decode.port=1",): ("C01", "all.children.decode.port", "unknown key"),
    (f"{K}=2", f"{K}=3"): ("C05", K, "given twice"),
    ("serving.decode=", "serving.decode.graph_mode=full"): ("C05", "serving.decode.graph_mode", "is given too"),
    ("model.path=a\nb: c",): ("C02", "model.path", "no command line can carry"),
    ("model.path=\udcff",): ("C02", "model.path", "no command line can carry"),
    ("model.path={{ home }}",): ("C03", "model.path", "templates are not read here"),
    ("model.name=\u0000",): ("C02", "model.name", "no command line can carry"),
    ("all.hosts.localhost.ansible_user=$ANSIBLE_VAULT;1.1;AES256",): (
        "C02",
        "all.hosts.localhost.ansible_user",
        "vaulted",
    ),
    ("model.path=" + "x" * 20000,): ("C02", "model.path", "no command line can carry"),
    ("topology.decode.port=8200",): ("R30", "topology.decode.port", "8200"),
}


@pytest.mark.parametrize("words", REFUSED, ids=lambda words: " ".join(words)[:50].encode("ascii", "replace").decode())
def test_what_is_refused_changes_nothing(words: tuple[str, ...], copy: MakeCopy) -> None:
    rule, key, said = REFUSED[words]
    found = copy("local")
    before = found.content()
    with pytest.raises(ConfigError) as refused:
        edit.set_values("local", [*words], found.root)
    problems = [p for p in refused.value.problems if (p.rule, p.key) == (rule, key)]
    assert problems, refused.value
    assert said in problems[0].message
    assert found.content() == before


def test_all_or_none_with_every_problem(copy: MakeCopy) -> None:
    found = copy("local")
    before = found.content()
    result = assign(found, "model.name=other", "mtp.k=1", f"{K}", "serving.x=1", "--json")
    assert result.exit_code == 2
    assert [(p["rule"], p["key"]) for p in json.loads(result.stdout)["problems"]] == [
        ("C01", "mtp.k"),
        ("C02", K),
        ("C01", "serving.x"),
    ]
    result = assign(found, "model.name=other", f"{K}=16", "mtp.method=mpt", "topology.decode.port=8200")
    assert result.exit_code == 2
    assert {line.split()[0] for line in result.stderr.splitlines() if line[:1] in "CR"} == {"R03", "R19", "R30"}
    assert found.content() == before


def test_a_broken_inventory_can_be_repaired(copy: MakeCopy) -> None:
    found = copy("local").edit({K: "1", "topology.decode.port": 8200})
    assert assign(found, f"{K}=1").exit_code == 2
    assert assign(found, f"{K}=1", "topology.decode.port=8300").exit_code == 0
    found.file("mtp").write_text("mtp: [\n")
    refused = assign(found, f"{K}=1")
    assert (refused.exit_code, "C06" in refused.stderr, str(found.file("mtp")) in refused.stderr) == (2, True, True)
    found.file("mtp").unlink()
    assert "C04" in assign(found, f"{K}=1").stderr
    assert "there is no inventory" in mtpctl("set", "nobody", f"{K}=1", "--inventories", str(found.root)).stderr


def test_hosts_with_dots_and_vaulted_neighbours(copy: MakeCopy) -> None:
    found = copy("a3")
    text = found.file("hosts").read_text().replace("p0:", "p0.example.org:")
    text = text.replace("      nic: eth0\n", f"      nic: eth0\n      ansible_user: {VAULT}", 1)
    found.file("hosts").write_text(text)
    result = assign(found, "all.hosts.p0.example.org.kv_port=37000", "all.hosts.p0.example.org.ansible_port=22")
    assert result.exit_code == 0, result.stderr
    after = found.file("hosts").read_text()
    assert after == text.replace("kv_port: 36000\n", "kv_port: 37000\n      ansible_port: 22\n")
    shown = assign(found, "all.hosts.p0.example.org.ansible_user=root")
    assert "(vaulted) -> root" in shown.stdout and "ANSIBLE_VAULT" not in shown.output
    assert found.file("hosts").read_text() == after.replace(VAULT, "root\n")


@pytest.mark.parametrize(
    ("text", "path", "value", "edited"),
    [
        ("a: 1", "a", 2, "a: 2"),
        ("a: 1\n", "b", 2, "a: 1\nb: 2\n"),
        ("a: 1", "b", 2, "a: 1\nb: 2"),
        ("a: 1 # x\r\n", "b", 2, "a: 1 # x\r\nb: 2\r\n"),
        ("a:", "a", 2, "a: 2"),
        ("a: # x\nb: 1\n", "a", 2, "a: 2 # x\nb: 1\n"),
        ("a: # x\nb: 1\n", "a.c", 2, "a: # x\n  c: 2\nb: 1\n"),
        ("a: null # x\n", "a.c.d", 2, "a: # x\n  c:\n    d: 2\n"),
        ("a: ~\n", "a", None, "a: ~\n"),
        ("a:   'x'   # y\n", "a", "z", "a:   'z'   # y\n"),
        ('a: "x"\n', "a", "z", 'a: "z"\n'),
        ("a: 'x'\n", "a", "it's", 'a: "it\'s"\n'),
        ("a: 'x'\n", "a", 3, "a: 3\n"),
        ("a:\n    b: 1\n    c: 2 # x\n", "a.b", REMOVED, "a:\n    c: 2 # x\n"),
        ("a:\n    b: 1\n    c: 2 # x\n", "a.c", REMOVED, "a:\n    b: 1\n"),
        ("a:\n  # of b\n  b: 1\n", "a.b", REMOVED, "a:\n  # of b\n"),
        ("a:\n  b: 1\n  d:\n    e: 1\n# end\n", "a.d", REMOVED, "a:\n  b: 1\n# end\n"),
        ("a: {b: 1, c: 2}\n", "a.b", REMOVED, "a: {c: 2}\n"),
        ("a: {b: 1, c: 2}\n", "a.c", REMOVED, "a: {b: 1}\n"),
        ("a: {b: 1}\n", "a.b", REMOVED, "a: {}\n"),
        ("a: {b: 1}\n", "a.c", 2, "a: {b: 1, c: 2}\n"),
        ("a: {b: 1}\n", "a.c.d", 2, "a: {b: 1, c: {d: 2}}\n"),
        ("a: {}\n", "a.c", 2, "a: {c: 2}\n"),
        ("a: {b: }\n", "a.b", 2, "a: {b: 2}\n"),
        ("a: [1, 2] # x\n", "a", [3], "a: [3] # x\n"),
        ("a: # x\n  - 1\n  - 2 # y\n# z\nb: 1\n", "a", [3], "a: [3] # x # y\n# z\nb: 1\n"),
        ("a:\n- 1\n- 2\nb: 1\n", "a", [3], "a: [3]\nb: 1\n"),
        ("a: |\n  x\n  y\nb: 1\n", "a", "z", "a: z\nb: 1\n"),
        ("a: >-\n  x\n\n\nb: 1\n", "c", 1, "a: >-\n  x\n\n\nb: 1\nc: 1\n"),
        ("a: &x 1\nb: 2\n", "a", 3, "a: 3\nb: 2\n"),
        ("a: &x {b: 1}\nc:\n  <<: *x\n", "c.b", 2, "a: &x {b: 1}\nc:\n  <<: *x\n  b: 2\n"),
        ("a: &x 1\nb: *x\n", "b", 2, "a: &x 1\nb: 2\n"),
        ("a: &x  # one\n  b: 1\n", "a.c", 2, "a: &x  # one\n  b: 1\n  c: 2\n"),
        ("a:\n  &x\n  b: 1\nd: 1\n", "a.c", 2, "a:\n  &x\n  b: 1\n  c: 2\nd: 1\n"),
        ("a: &x\n  b: {c: 1}\nd: 1\n", "a.e.f", 2, "a: &x\n  b: {c: 1}\n  e:\n    f: 2\nd: 1\n"),
        ("a: &x\n  <<: {y: 1}\n  b: 1\n", "a.c", 2, "a: &x\n  <<: {y: 1}\n  b: 1\n  c: 2\n"),
        ("a:\n  b:\n    c: 1\n\n\n  # end\n", "a.b.d", 2, "a:\n  b:\n    c: 1\n    d: 2\n\n\n  # end\n"),
        ("? a\n: 1\n", "a", 2, "? a\n: 2\n"),
        ("\ufeffa: 1\n", "a", 2, "\ufeffa: 2\n"),
        ("a: 1\nb: 1\n", "c", REMOVED, "a: 1\nb: 1\n"),
        ("a: 1\n", "b.c", REMOVED, "a: 1\n"),
        ("a: 1\n", "b", "no", 'a: 1\nb: "no"\n'),
        ("a: 1\n", "b", "1:2", 'a: 1\nb: "1:2"\n'),
        ("a: 1\n", "b", "- x", 'a: 1\nb: "- x"\n'),
        ("a: 1\n", "b", "", 'a: 1\nb: ""\n'),
        ("a: 1\n", "b", 1e-05, "a: 1\nb: 0.000010\n"),
        ("a: 1\n", "yes", 1, 'a: 1\n"yes": 1\n'),
    ],
)
def test_layouts(text: str, path: str, value: Any, edited: str) -> None:
    assert put(text, tuple(path.split(".")), value) == edited


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("a: &x 1\nb: *x\n", "a", 2),
        ("a: &x {b: 1}\nc: *x\n", "a.b", 2),
        ("a: &x {b: 1}\nc: *x\n", "c.b", 2),
        ("a: &x {b: 1}\nc: {<<: *x}\n", "c.b", REMOVED),
        ("a: &x {b: 1}\nc: {<<: *x}\n", "a.b", 2),
        ("- a: 1\n", "a", 2),
        ("", "a", 2),
        ("a: {b, c: 1}\n", "a.b", 2),
        ("a: {? b : 1}\n? c\n: 1\n", "c", REMOVED),
    ],
)
def test_what_cannot_be_changed_alone_is_refused(text: str, path: str, value: Any) -> None:
    with pytest.raises(Unplaceable) as refused:
        put(text, tuple(path.split(".")), value)
    assert refused.value.line >= 1 and refused.value.reason


KEYS = st.sampled_from(["a", "b", "c", "key", "long_key_name", "yes", "1", "with space", "é"])
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1000, 1000),
    st.sampled_from([0.5, 0.25]),
    st.text(st.sampled_from("abc :#-'\"{}[]&*\u00e9"), max_size=8),
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
)
TREES = st.recursive(
    st.dictionaries(KEYS, LEAVES, min_size=1, max_size=4),
    lambda inner: st.dictionaries(KEYS, st.one_of(inner, LEAVES), min_size=1, max_size=4),
    max_leaves=8,
)


def paths(data: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    return [path] * bool(path) + [
        found for key, value in (data.items() if isinstance(data, dict) else ()) for found in paths(value, (*path, key))
    ]


@settings(max_examples=500, deadline=None)
@given(TREES, st.data())
def test_one_value_changes_and_every_comment_stays(data: dict[str, Any], draw: Any) -> None:
    style = draw.draw(st.sampled_from([None, False, True]))
    lines = yaml.safe_dump(
        data, default_flow_style=style, allow_unicode=True, indent=draw.draw(st.integers(2, 4))
    ).split("\n")
    end = draw.draw(st.sampled_from(["\n", "\r\n"]))
    plain = not re.search(r"['\"]", "".join(lines))  # a comment inside quotes would be none
    numbers = iter(range(99))
    noted = [
        part
        for line in lines[:-1]
        for part in ([f"# {next(numbers)} 注"] if style is False and plain else [])
        + [line + f"  # {next(numbers)}" * plain]
    ]
    text = end.join([*noted, ""])
    tree, faults = document.parse(text)
    assert faults == [] and nodes.plain(tree, lambda path, line: None)[0] == data
    path = draw.draw(st.sampled_from(paths(data)))
    if draw.draw(st.booleans()):
        path = (*path[:-1], draw.draw(KEYS))
    value = draw.draw(st.one_of(LEAVES, st.just(REMOVED)))
    edited = put(text, path, value)
    wanted = yaml.safe_load(text)
    node = wanted
    for part in path[:-1]:
        node = node[part]
    leaf = not isinstance(node.get(path[-1]), dict | list)
    if value is REMOVED:
        node.pop(path[-1], None)
    else:
        node[path[-1]] = value
    found = yaml.safe_load(edited)
    assert prune(found) == prune(wanted)
    gone = set(re.findall(r"# \d+", text)) - set(re.findall(r"# \d+", edited))
    assert not leaf or len(gone) <= (value is REMOVED), edited
    assert edited.count("\n" if end == "\r\n" else "\r") == (edited.count("\r\n") if end == "\r\n" else 0)


def prune(data: Any) -> Any:
    """Without the difference between an empty mapping and null."""
    if isinstance(data, dict):
        return {key: prune(value) for key, value in data.items()} or None
    return data


WORDS = st.one_of(
    st.tuples(
        st.sampled_from([*all_keys(), "all.hosts.localhost.address", "all.hosts.localhost.rank_port", "mtp", "x.y"]),
        st.one_of(
            st.text(max_size=12),
            st.integers(-5, 9000).map(str),
            st.sampled_from(
                ["", "null", "true", "no", "[1, 2]", "{a: 1}", "2,4", "auto", "slack", "full", "0.5", "'1'"]
            ),
        ),
    ).map("=".join),
    st.text(max_size=20),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(WORDS, min_size=1, max_size=3), base=st.sampled_from(["local", "local-single"]))
def test_any_words_are_carried_out_or_refused(words: list[str], base: str, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / base, ignore_errors=True)
    shutil.copytree(api.inventories() / base, tmp_path / base)
    found = Copy(tmp_path, base)
    before = found.content()
    try:
        checked, changes = edit.set_values(base, words, found.root)
    except ConfigError as error:
        assert error.problems and all(p.key.isprintable() and p.remedy for p in error.problems)
        assert found.content() == before
        return
    assert api.load_checked(base, found.root) == checked.cluster
    assert bool(changes) == (found.content() != before)
    for one in changes:
        assert one.new is None or one.new.isprintable()


def test_a_failing_disk_leaves_every_file_as_it_was(copy: MakeCopy, monkeypatch: pytest.MonkeyPatch) -> None:
    found = copy("local")
    before = found.content()
    words = [f"{K}=3", "model.name=other", "serving.seed=1"]
    for fails_at in (1, 2, 3):
        calls = 0
        replace = Path.replace

        def failing(self: Path, target: Path, at: int = fails_at) -> Path:
            nonlocal calls
            calls += 1
            if calls == at:
                raise OSError(28, "No space left on device", str(target))
            return replace(self, target)  # noqa: B023

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", failing)
            with pytest.raises(OSError, match="No space left"):
                edit.set_values("local", words, found.root)
        assert found.content() == before, fails_at
    edit.set_values("local", words, found.root)
    assert sum(before[name] != now for name, now in found.content().items()) == 3


def test_a_file_that_somebody_else_changes_is_not_overwritten(copy: MakeCopy, monkeypatch: pytest.MonkeyPatch) -> None:
    found = copy("local")
    theirs = found.file("mtp").read_bytes().replace(b"tokens: 1", b"tokens: 5")
    stage = store._stage

    def slow(place: Path, content: bytes) -> Path:
        found.file("mtp").write_bytes(theirs)
        return stage(place, content)

    monkeypatch.setattr(store, "_stage", slow)
    result = assign(found, f"{K}=3", "model.name=other")
    assert (result.exit_code, "somebody else changed the file" in result.stderr) == (2, True)
    assert found.file("mtp").read_bytes() == theirs
    assert not list(found.folder.rglob(".*"))
    assert "name: tiny-deepseek-v3" in found.file("model").read_text()


def _set(root: Path, word: str) -> None:
    edit.set_values("local", [word], root)


def test_two_at_once_do_not_lose_each_others_change(copy: MakeCopy) -> None:
    found = copy("local")
    words = [f"{K}=2", "mtp.padding=slack", "mtp.verification=block", "mtp.attention=batch_expansion", "model.name=b"]
    context = multiprocessing.get_context("fork")
    running = [context.Process(target=_set, args=(found.root, word)) for word in words]
    for one in running:
        one.start()
    for one in running:
        one.join(60)
        assert one.exitcode == 0
    mtp = api.load_checked("local", found.root).mtp
    assert (mtp.k, mtp.padding, mtp.verification, mtp.attention) == (2, "slack", "block", "batch_expansion")


def test_a_linked_file_stays_a_link(copy: MakeCopy, tmp_path: Path) -> None:
    found = copy("local")
    real = tmp_path / "shared-mtp.yml"
    found.file("mtp").rename(real)
    found.file("mtp").symlink_to(real)
    assert assign(found, f"{K}=2").exit_code == 0
    assert found.file("mtp").is_symlink() and "tokens: 2" in real.read_text()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_leave_to_write(copy: MakeCopy) -> None:
    found = copy("local")
    (found.folder / "group_vars/all").chmod(0o500)
    with pytest.raises(PermissionError):
        edit.set_values("local", [f"{K}=2"], found.root)
