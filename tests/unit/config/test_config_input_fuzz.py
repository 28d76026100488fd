"""Whatever the files hold: an answer in bounded time and memory, and never a meaning that Ansible does not see."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from inventory_copy import Copy
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError as RuamelError

from mtp_runtime.config import api, document, nodes
from mtp_runtime.config.files import NAMES, Files, on_disk
from mtp_runtime.config.load import load_files
from mtp_runtime.config.problems import ConfigError
from mtp_runtime.config.render import render
from mtp_runtime.config.rules import check_cluster

MakeCopy = Callable[[str], Copy]
BASES = ("local", "local-single", "a3")
CONTENT = {name: {s: on_disk(api.inventories() / name).read(s) for s in NAMES} for name in BASES}
# What YAML acts on, and what people mistype.
PIECES = [
    *(b"\t", b"\n", b"\r\n", b"\r", b"  ", b": ", b":", b"- ", b"? ", b"# ", b", ", b"{", b"}", b"[", b"]", b"'", b'"'),
    *(b"&a ", b"*a", b"<<: *a\n", b"<<: ", b"!vault |\n  ", b"!!int ", b"!x ", b"|\n", b">-\n", b"---\n", b"...\n"),
    *(b"%YAML 1.1\n", b"%TAG ! x\n", b"yes", b"no", b"null", b"~", b"010", b"1_0", b"1e9", b"12:30", b"2026-01-31"),
    *(
        b".inf",
        b".nan",
        b"9" * 30,
        b"9" * 5000,
        b"-1",
        b"0",
        b"16",
        b"65536",
        b"true",
        b"{{ x }}",
        b"\x00",
        b"\x1b[31m",
    ),
    *(b"\xff", b"\xef\xbb\xbf", b"\xff\xfe", "：".encode(), "\u00a0".encode(), "\u2028".encode(), "😀".encode()),
    *(b'"\\x00"', b'"\\ud800"', b'"\\U00110000"', b"[" * 50, b"{a: " * 50, b"$ANSIBLE_VAULT;1.1;AES256\n"),
]
Edit = tuple[float, int, bytes]
EDITS = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 40), st.one_of(st.sampled_from(PIECES), st.binary(max_size=8))),
    min_size=1,
    max_size=4,
)


def edited(content: bytes, edits: list[Edit]) -> bytes:
    """The bytes with pieces put in and others left out."""
    for at, length, piece in edits:
        start = int(at * len(content))
        content = content[:start] + piece + content[start + length :]
    return content


def judge(content: dict[str, bytes]) -> bool:
    """Does the inventory pass? It is refused with problems, or it can be rendered; nothing else."""
    files = Files("fuzzed", content.__getitem__, lambda section: NAMES[section])
    try:
        cluster, places = load_files(files)
    except ConfigError as error:
        assert error.problems
        for problem in error.problems:
            assert problem.file in NAMES.values() and problem.message and problem.remedy and problem.rule
            assert all(text.isprintable() for text in (problem.message, problem.key, problem.remedy)), problem
            assert 0 <= problem.line <= content[section_of(problem.file)].count(b"\n") + 100
        return False
    if check_cluster(cluster, places):
        return False
    words = [word for rank in render(cluster)["ranks"] for word in (*rank["argv"], *rank["env"].values())]
    assert all(isinstance(word, str) and word.isprintable() for word in words)
    return True


def section_of(file: str) -> str:
    return next(section for section, name in NAMES.items() if name == file)


@settings(max_examples=400, deadline=None)
@given(base=st.sampled_from(BASES), section=st.sampled_from(list(NAMES)), edits=EDITS)
@example("local", "mtp", [(0.0, 0, b"")])
@example("a3", "model", [(0.4375, 0, b"\xef\xbb\xbf")])
def test_mutated_files(base: str, section: str, edits: list[Edit]) -> None:
    judge({**CONTENT[base], section: edited(CONTENT[base][section], edits)})


@settings(max_examples=150, deadline=None)
@given(section=st.sampled_from(list(NAMES)), content=st.one_of(st.binary(max_size=200), st.text(max_size=200)))
def test_any_bytes(section: str, content: bytes | str) -> None:
    given_bytes = content if isinstance(content, bytes) else content.encode("utf-8", "replace")
    assert not judge({**CONTENT["local"], section: given_bytes})


@settings(max_examples=100, deadline=None)
@given(base=st.sampled_from(BASES), pairs=st.lists(st.tuples(*[st.sampled_from(list(NAMES))] * 2), max_size=3))
def test_files_in_each_others_places(base: str, pairs: list[tuple[str, str]]) -> None:
    content = dict(CONTENT[base])
    for one, other in pairs:
        content[one], content[other] = content[other], content[one]
    assert judge(content) == (content == CONTENT[base])


def ours(text: str) -> Any:
    """A text's data; None when anything about it is refused."""
    try:
        tree, faults = document.parse(text)
        return None if faults else nodes.plain(tree, lambda path, line: None)[0]
    except nodes.Refused:
        return None


def same(one: Any, other: Any) -> bool:
    """Equal, types too, the order of keys left aside; nan is itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)


@settings(max_examples=400, deadline=None)
@given(base=st.sampled_from(BASES), section=st.sampled_from(list(NAMES)), edits=EDITS)
def test_what_is_read_is_what_ansible_reads(base: str, section: str, edits: list[Edit]) -> None:
    try:
        text = edited(CONTENT[base][section], edits).decode()
    except UnicodeDecodeError:
        return
    found = ours(text)
    if found is not None and "ANSIBLE_VAULT" not in text:
        assert same(found, yaml.load(text, Loader=document.LOADER)), text


TEXTS = st.text(st.sampled_from("ab1290.-+_:eExo ~#,[]{}&*!|>'\"%@`yesnoffNULLtrue\u00e9"), min_size=0, max_size=10)


@settings(max_examples=500, deadline=None)
@given(TEXTS)
def test_one_meaning_in_both_versions_of_yaml(text: str) -> None:
    """What is not refused is the same value to Ansible (YAML 1.1) and to a reader of YAML 1.2."""
    whole = f"a: {text}\n"
    found = ours(whole)
    if found is None:
        return
    assert same(found, yaml.load(whole, Loader=document.LOADER))
    try:
        other = YAML(typ="safe", pure=True).load(whole)
    except (RuamelError, ValueError):
        return
    assert same(found, other), whole


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(-(10**9), 10**9), st.floats(0.001, 0.999), st.text(max_size=8)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4), st.dictionaries(st.text(min_size=1, max_size=6), inner, max_size=4)
        ),
        max_leaves=20,
    )
)
def test_data_that_a_program_wrote(data: Any) -> None:
    """Read back as it was, or refused; never as something else."""
    for style in (None, True, False):
        found = ours(yaml.safe_dump({"a": data}, default_flow_style=style, allow_unicode=True))
        assert found is None or same(found, {"a": data})


def laugh(levels: int, width: int, merge: bool) -> str:
    """Aliases of aliases: width ** levels values."""
    start = "a0: &a0 {x: 1}\n" if merge else "a0: &a0 [x]\n"
    for level in range(1, levels):
        names = ", ".join([f"*a{level - 1}"] * width)
        start += f"a{level}: &a{level} " + (f"{{<<: [{names}], k{level}: 1}}\n" if merge else f"[{names}]\n")
    return start


HALF = 1 << 17
BOMBS = {
    "aliases": laugh(20, 9, False),
    "few aliases, many levels": laugh(2000, 2, False),
    "merges": laugh(20, 9, True),
    "a chain of merges": laugh(3000, 1, True),
    "merges of merges": laugh(1000, 30, True),
    "brackets": "a: " + "[" * HALF,
    "braces": "{a: " * (HALF // 4),
    "dashes": "- " * HALF,
    "question marks": "? " * HALF,
    "many keys": "".join(f"k{n}: {n}\n" for n in range(20000)),
    "many unknown keys": "mtp:\n" + "".join(f"  num_speculative_token{n}: {n}\n" for n in range(7000)),
    "many equal keys": "a: 1\n" * 50000,
    "many scalars with two meanings": "mtp: [" + "yes," * 60000 + "]",
    "many anchors": "".join(f"- &a{n} x\n" for n in range(20000)),
    "a long list": "a: [" + "1," * HALF + "]",
    "a long text": "a: '" + "x" * (2 * HALF - 10) + "'",
    "a long key": "a" * (2 * HALF - 10) + ": 1",
    "a long number": "a: " + "9" * (2 * HALF - 10),
    "a long number of another kind": "a: 1" + ":59" * (HALF // 2),
    "a long comment": "#" * (2 * HALF - 10),
    "empty lines": "\n" * (2 * HALF - 10),
    "carriage returns": "\r" * (2 * HALF - 10),
    "quotes": "a: '" + "'" * (2 * HALF - 10),
    "colons": "a:" * HALF,
    "tags": "a: " + "!x " * (HALF // 2),
    "stars": "a: " + "*" * HALF,
    "wide colons": "a：b\n" * 30000 + "c: d\n",
}
LIMITED = """
import resource, sys, time
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
from pathlib import Path
from mtp_runtime.config.load import load
from mtp_runtime.config.problems import ConfigError
load(Path("ansible/inventories/local"))
start = time.process_time()
try:
    load(Path("ansible/inventories/local"), {"mtp": Path(sys.argv[1]).read_text()})
except ConfigError as error:
    print(time.process_time() - start, error.problems[0].rule, len(error.problems))
"""


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_in_seconds_and_little_memory(name: str, tmp_path: Path) -> None:
    """Under a limit of 1 GiB of address space, pydantic and YAML libraries included; seconds of processor time."""
    file = tmp_path / "mtp.yml"
    file.write_text(BOMBS[name])
    env = {**os.environ, "PYTHONPATH": str(api.repository())}
    command = [sys.executable, "-c", LIMITED, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=api.repository(), env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    seconds, rule, problems = done.stdout.split()
    assert rule in ("C01", "C02", "C03", "C05", "C06", "C07")
    assert float(seconds) < 10, seconds
    assert int(problems) <= 101
