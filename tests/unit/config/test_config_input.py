"""YAML as people write it: read right, or refused with file, line and remedy; never two meanings, never a traceback."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from inventory_copy import Copy
from ruamel.yaml import YAML
from typer.testing import CliRunner, Result

from mtp_runtime.cli.app import app
from mtp_runtime.config import api, document, nodes, scalars
from mtp_runtime.config.files import MAX_FILE_BYTES

MakeCopy = Callable[[str], Copy]
# What `ansible-vault encrypt_string` prints, with a password nobody needs to know.
VAULT = """!vault |
          $ANSIBLE_VAULT;1.1;AES256
          66386439653236336462626566653063336164663966303231363934653561363964363833313662
          6431626536303530376336343832656537303632313433360a626438346336353331386135323734
"""
SECRETS = ("ANSIBLE_VAULT", "66386439653236336462626566653063", "6431626536303530376336343832656")


def mtpctl(*words: str) -> Result:
    """One call in this process."""
    return CliRunner().invoke(app, words)


def checked(found: Copy, *words: str) -> Result:
    return mtpctl("check", found.name, "--inventories", str(found.root), *words)


def change(found: Copy, section: str, old: str, new: str) -> Copy:
    """The copy with a text replaced in one file."""
    text = found.file(section).read_text()
    assert old in text
    found.file(section).write_text(text.replace(old, new, 1))
    return found


def read(text: str) -> object:
    """A text's data; it must be read without a complaint."""
    tree, faults = document.parse(text)
    assert faults == []
    return nodes.plain(tree, lambda path, line: None)[0]


@pytest.mark.parametrize(
    "content",
    [
        lambda text: b"\xef\xbb\xbf" + text.encode(),
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode(),
        lambda text: ("# 多令牌预测：操作员切换的文件\n# تنبؤ متعدد الرموز 🚀 ёж\n" + text).encode(),
        lambda text: ("---\n" + text + "...\n").encode(),
        lambda text: text.replace(": ", ":\t").encode(),
        lambda text: text.replace("\n", "  \n").rstrip("\n").encode(),
    ],
    ids=["BOM", "CRLF", "BOM and CRLF", "comments", "document marks", "tabs behind colons", "trailing blanks"],
)
@pytest.mark.parametrize("name", ["local", "a3"])
def test_bytes_that_editors_write(name: str, content: Callable[[str], bytes], copy: MakeCopy) -> None:
    found = copy(name)
    for section in ("hosts", "model", "topology", "mtp", "serving", "monitoring"):
        found.file(section).write_bytes(content(found.file(section).read_text()))
    assert api.load_checked(name, found.root) == api.load_checked(name)


def test_anchors_aliases_and_merges(copy: MakeCopy) -> None:
    found = copy("local")
    found.file("topology").write_text(
        "topology:\n"
        "  engine: vllm-cpu\n"
        "  release: '0.32.0'\n"
        "  connector: NixlConnector\n"
        "  prefill: &rank {dp: &one 1, tp: *one, port: 8200, side_channel_port: 8250}\n"
        "  decode:\n"
        "    <<: *rank\n"
        "    port: 8300\n"
        "    side_channel_port: 8350\n"
    )
    assert api.plan("local", found.root) == api.plan("local")
    change(found, "topology", "port: 8300", "port: 8200")
    shown = checked(found).stderr
    assert f"R30  {found.file('topology')}:8: topology.decode.port" in shown


def test_where_a_merged_value_is_wrong_its_own_line_is_named(copy: MakeCopy) -> None:
    found = change(copy("local"), "topology", "  prefill:\n", "  prefill: &rank\n")
    change(found, "topology", "    tp: 1\n", "    tp: 0\n")
    change(found, "topology", "  decode:\n    dp: 1\n    tp: 1\n", "  decode:\n    <<: *rank\n")
    line = found.file("topology").read_text().splitlines().index("    tp: 0") + 1
    shown = checked(found).stderr
    for role in ("prefill", "decode"):
        assert f"C03  {found.file('topology')}:{line}: topology.{role}.tp" in shown


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("a: {b: 1}\nc: {<<: {b: 2}, d: 3}", {"a": {"b": 1}, "c": {"b": 2, "d": 3}}),
        ("a: &a {x: 1}\nb: &b {x: 2, y: 2}\nc: {<<: [*a, *b], z: 3}", None),
        ("a: &a {x: 1}\nb: &b {<<: *a, y: 2}\nc: {y: 0, <<: *b}", None),
        ("'<<': 1", {"<<": 1}),
        ("? a\n: 1", {"a": 1}),
        ("a: |\n  two\n  lines\nb: >-\n  one\n  line\n", {"a": "two\nlines\n", "b": "one line"}),
        ("a:\n- 1\n- 2", {"a": [1, 2]}),
        ("a: [1, 0x10, -3, +4, 0.5, .5, 1., .inf, 'x', \"\\u00e9\", ~, null, True, FALSE]", None),
        ("a:\nb: ''", {"a": None, "b": ""}),
        ("a: 0.32.0\nb: 192.0.2.1\nc: ::1\nd: a:b\ne: y", None),
    ],
)
def test_structures(text: str, data: object) -> None:
    """As Ansible reads them."""
    theirs = yaml.safe_load(text)
    assert read(text) == theirs
    assert data is None or data == theirs


@pytest.mark.parametrize(
    "text", ["a: &a [1, *a]", "a: &a {b: {c: *a}}", "a: *b", "*a : 1", "&a a: 1\n*a : 2", "- &a 1\n- &a 2"]
)
def test_aliases_without_an_end_or_a_beginning_are_refused(text: str) -> None:
    with pytest.raises(nodes.Refused) as refused:
        document.parse(text)
    assert refused.value.faults[0].rule == "C06"


# A plain scalar, and what it is here: REFUSED where YAML 1.1 and 1.2 differ.
REFUSED = object()
SCALARS = {
    "1": 1,
    "-1": -1,
    "0": 0,
    "0x1F": 31,
    "1.5": 1.5,
    ".5": 0.5,
    "1.0e+3": 1000.0,
    "true": True,
    "False": False,
    "null": None,
    "~": None,
    "": None,
    "mtp": "mtp",
    "y": "y",
    "0.32.0": "0.32.0",
    "1:80": "1:80",
    "tRUE": "tRUE",
    "_1": "_1",
    "yes": REFUSED,
    "Off": REFUSED,
    "no": REFUSED,
    "010": REFUSED,
    "08": REFUSED,
    "1_000": REFUSED,
    "0b11": REFUSED,
    "0o17": REFUSED,
    "1e3": REFUSED,
    "1.0e3": REFUSED,
    "12:30": REFUSED,
    "2026-01-31": REFUSED,
    "2026-01-31T00:00:00Z": REFUSED,
    "=": REFUSED,
    "<<": REFUSED,
    "1" + "_0" * 100: REFUSED,
}


@pytest.mark.parametrize("text", SCALARS)
def test_a_scalar_with_two_meanings_is_refused(text: str) -> None:
    value, trouble = scalars.read_scalar(text)
    if SCALARS[text] is REFUSED:
        assert trouble and text[:40] in trouble
    else:
        assert (value, type(value), trouble) == (SCALARS[text], type(SCALARS[text]), None)
    assert scalars.unmistakable(text, value)


@pytest.mark.parametrize("text", [".inf", "-.inf", ".nan", "9" * 40, "-" + "9" * 39, "9" * 5000])
def test_numbers_that_are_none(text: str) -> None:
    value, trouble = scalars.read_scalar(text)
    assert trouble is None
    assert isinstance(value, scalars.TooLong) == (len(text) > 40)
    assert isinstance(value, int) or not math.isfinite(value)


# (section, old, new) on inventory local -> what is said, at which key, with which remedy
TYPES = {
    "unquoted yes": (("mtp", "enabled: true", "enabled: yes"), "C02", "mtp.enabled", "write true"),
    "quoted yes": (("mtp", "enabled: true", "enabled: 'yes'"), "C02", "mtp.enabled", "write true, without quotes"),
    "quoted boolean": (("mtp", "enabled: true", 'enabled: "false"'), "C02", "mtp.enabled", "write false, without"),
    "y": (("mtp", "enabled: true", "enabled: n"), "C02", "mtp.enabled", "write false, without quotes"),
    "number for a boolean": (("mtp", "enabled: true", "enabled: 1"), "C02", "mtp.enabled", "true or false"),
    "yes for a number": (
        ("mtp", "num_speculative_tokens: 1", "num_speculative_tokens: on"),
        "C02",
        "mtp.num_speculative_tokens",
        "write true",
    ),
    "quoted number": (
        ("mtp", "num_speculative_tokens: 1", 'num_speculative_tokens: "1"'),
        "C02",
        "mtp.num_speculative_tokens",
        "drop the quotes: a number has none, as in 1",
    ),
    "octal": (
        ("mtp", "num_speculative_tokens: 1", "num_speculative_tokens: 010"),
        "C02",
        "mtp.num_speculative_tokens",
        "write 10, or",
    ),
    "underscores": (("model", "len: 8192", "len: 8_192"), "C02", "model.max_model_len", "the number in full"),
    "exponent": (("model", "len: 8192", "len: 8e3"), "C02", "model.max_model_len", "the number in full"),
    "fraction": (("model", "len: 8192", "len: 8192.0"), "C02", "model.max_model_len", "no quotes around numbers"),
    "minutes": (("model", "len: 8192", "len: 81:92"), "C02", "model.max_model_len", "no quotes around numbers"),
    "5000 digits": (("model", "len: 8192", f"len: {'9' * 5000}"), "C03", "model.max_model_len", "the stated limits"),
    "40 digits": (("model", "len: 8192", f"len: {'9' * 40}"), "C03", "model.max_model_len", "the stated limits"),
    "infinity": (("model", "len: 8192", "len: .inf"), "C02", "model.max_model_len", "no quotes around numbers"),
    "unquoted release": (
        ("topology", 'release: "0.32.0"', "release: 0.32"),
        "C02",
        "topology.release",
        "put it in quotes",
    ),
    "date": (("model", "name: tiny-deepseek-v3", "name: 2026-01-31"), "C02", "model.name", "in quotes"),
    "boolean name": (("model", "name: tiny-deepseek-v3", "name: off"), "C02", "model.name", '"off" in quotes'),
    "number as a key": (("hosts", "    localhost:\n", "    1:\n"), "C02", "all.hosts.1", 'write "1" in quotes'),
    "boolean as a key": (("hosts", "    localhost:\n", "    no:\n"), "C02", "all.hosts.no", 'write "no" in quotes'),
    "the same key twice": (("mtp", "  method: mtp", "  method: mtp\n  'method': mtp"), "C05", "mtp.method", "keep one"),
    "the same host twice": (
        ("hosts", "  children:", "    localhost: {}\n  children:"),
        "C05",
        "all.hosts.localhost",
        "keep one",
    ),
    "tab": (("mtp", "  enabled: true", "\tenabled: true"), "C06", "(file)", "spaces in the place of the tab"),
    "tab in between": (("mtp", "  method: mtp", "  method: mtp\n \tx: 1"), "C06", "(file)", "the place of the tab"),
    "wide colon": (("mtp", "enabled: true", "enabled：true"), "C06", "(file)", "write ':'"),
    "no-break space": (("mtp", "  method: mtp", "\u00a0 method: mtp"), "C06", "(file)", "write a space"),
    "curly quotes": (("topology", '"0.32.0"', "“0.32.0”: x"), "C06", "(file)", "write '\"'"),
    "line separator": (("mtp", "# How drafts", "# How\u2028drafts"), "C06", "(file)", "remove it"),
    "bell": (("mtp", "# How drafts", "# How\adrafts"), "C06", "(file)", "remove it"),
    "template": (("model", "path: mtp_runtime", "path: {{ home }}"), "C06", "(file)", ""),
    "tag": (("mtp", "tokens: 1", "tokens: !!int '1'"), "C06", "(file)", "without the tag"),
    "own tag": (("mtp", "tokens: 1", "tokens: !env K"), "C06", "(file)", "without the tag"),
    "two documents": (("mtp", "mtp:", "---\n---\nmtp:"), "C06", "(file)", ""),
    "not closed": (("mtp", "enabled: true", "enabled: [true"), "C06", "(file)", "correct the YAML"),
    "quote not closed": (("mtp", "padding: auto", "padding: 'auto"), "C06", "(file)", "correct the YAML"),
    "indentation": (("mtp", "  method: mtp", "   method: mtp"), "C06", "(file)", "correct the YAML"),
    "empty file": (("mtp", "", ""), "C02", "(file)", "write a value"),
    "whole file vaulted": (("mtp", "", "$ANSIBLE_VAULT;1.1;AES256\n3132\n"), "C06", "(file)", "vault single values"),
}


@pytest.mark.parametrize("name", TYPES)
def test_what_is_refused_and_how(name: str, copy: MakeCopy) -> None:
    (section, old, new), rule, key, remedy = TYPES[name]
    found = copy("local")
    if old:
        change(found, section, old, new)
    else:
        found.file(section).write_text(new)
    answer = json.loads(checked(found, "--json").stdout)
    assert answer["ok"] is False
    problems = [p for p in answer["problems"] if p["file"] == str(found.file(section))]
    assert [(p["rule"], p["key"]) for p in problems] == [(rule, key)], answer["problems"]
    assert remedy in problems[0]["remedy"]
    if old:
        line = found.file(section).read_text().split("\n")[problems[0]["line"] - 1]
        assert any(part[:20].strip() in line for part in new.split("\n") if part), (line, problems)


def test_every_file_is_reported_at_once(copy: MakeCopy) -> None:
    found = change(copy("local"), "mtp", "enabled: true", "enabled: yes")
    change(found, "model", "max_model_len: 8192", "max_model_len: '8192'")
    change(found, "topology", "    dp: 1", "    dp: one")
    change(found, "serving", "  seed: 1024", "  sead: 1024")
    answer = json.loads(checked(found, "--json").stdout)
    assert [(p["rule"], p["key"]) for p in answer["problems"]] == [
        ("C02", "model.max_model_len"),
        ("C02", "mtp.enabled"),
        ("C01", "serving.sead"),
        ("C02", "topology.prefill.dp"),
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfem\x00t\x00p\x00", "it is UTF-16, not UTF-8"),
        (b"mtp:\n  enabled: true\n  method: m\xe9thode\n", "not UTF-8: byte 0xe9 in line 3"),
        (b"#" * (MAX_FILE_BYTES + 1), f"larger than {MAX_FILE_BYTES} bytes"),
        (b"", "expected a mapping, found nothing"),
        (b"- mtp", "expected a mapping, found list"),
        (b"mtp", "expected a mapping, found str"),
    ],
)
def test_bytes_that_are_no_inventory(content: bytes, said: str, copy: MakeCopy) -> None:
    found = copy("local")
    found.file("mtp").write_bytes(content)
    result = checked(found)
    assert (result.exit_code, said in result.stderr) == (2, True), result.stderr


def test_a_file_that_cannot_be_read_hides_nothing_of_the_others(copy: MakeCopy) -> None:
    found = change(copy("local"), "mtp", "enabled: true", "enabled: [true")
    change(found, "model", "max_model_len: 8192", "max_model_len: '8192'")
    change(found, "serving", "  seed: 1024\n", "  seed: 1024\n  seed: -1\n  sead: 1\n")
    change(found, "hosts", "      address: 127.0.0.1\n", "      address: 127.0.0.1\n      nik: eth0\n")
    found.file("topology").unlink()
    answer = json.loads(checked(found, "--json").stdout)
    assert sorted((p["rule"], p["key"]) for p in answer["problems"]) == [
        ("C01", "all.hosts.localhost.nik"),
        ("C01", "serving.sead"),
        ("C02", "model.max_model_len"),
        ("C04", "(file)"),
        ("C05", "serving.seed"),
        ("C06", "(file)"),
    ]


def test_a_pipe_and_an_endless_device_do_not_hold_the_check_up(copy: MakeCopy) -> None:
    found = copy("local")
    for section, said in (("mtp", "No regular file"), ("model", "No regular file"), ("serving", "Is a directory")):
        found.file(section).unlink()
        if section == "mtp":
            os.mkfifo(found.file(section))
        elif section == "model":
            found.file(section).symlink_to("/dev/zero")
        else:
            found.file(section).mkdir()
        assert f"C04  {found.file(section)}: (file): {said}." in checked(found).stderr


def test_escapes_never_reach_the_terminal(copy: MakeCopy) -> None:
    found = change(copy("local"), "mtp", "  method: mtp", '  "\\e[31mred\\u202e": 1\n  method: "\\e]0;x\\a"')
    result = checked(found)
    assert result.exit_code == 2
    assert all(char.isprintable() or char == "\n" for char in result.output)
    assert r"mtp.\x1b[31mred\u202e" in result.stderr


def test_thousands_of_problems_are_not_printed(copy: MakeCopy) -> None:
    found = change(copy("local"), "mtp", "mtp:\n", "mtp:\n" + "".join(f"  key{n}: 1\n" for n in range(9000)))
    answer = json.loads(checked(found, "--json").stdout)
    assert len(answer["problems"]) == 101
    assert any("8900 more" in p["message"] for p in answer["problems"])


# Vaulted values: only Ansible can read them.


@pytest.mark.parametrize(
    "key",
    [
        *("ansible_password", "ansible_become_password", "ansible_user", "ansible_ssh_private_key_file"),
        *("ansible_port", "ansible_become"),
    ],
)
def test_a_vaulted_login_changes_nothing(key: str, copy: MakeCopy) -> None:
    found = change(copy("a3"), "hosts", "      nic: eth0\n", f"      nic: eth0\n      {key}: {VAULT}")
    where = ("--inventories", str(found.root))
    for words in (("check", "a3"), ("check", "a3", "--json"), ("render", "a3"), ("render", "a3", "--json")):
        result = mtpctl(*words, *where)
        assert result.exit_code == 0, result.stderr
        assert not any(secret in result.output for secret in SECRETS)
    assert api.plan("a3", found.root) == api.plan("a3")
    assert yaml.load(found.file("hosts").read_text(), Loader=vault_loader())["all"]["hosts"]["p0"][key]


def vault_loader() -> type[yaml.SafeLoader]:
    """Ansible's reader, as far as it matters here."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!vault", lambda loader, node: loader.construct_scalar(node))
    return Loader


@pytest.mark.parametrize(
    ("section", "old", "key"),
    [
        ("mtp", "num_speculative_tokens: 1", "mtp.num_speculative_tokens"),
        ("model", "path: /mnt/weights/DeepSeek-R1-W8A8-MTP", "model.path"),
        ("hosts", "address: 192.0.2.11", "all.hosts.p0.address"),
        ("hosts", "ansible_host: 192.0.2.11", "all.hosts.p0.ansible_host"),
        ("serving", "policy", "serving.router.policy"),
        ("topology", "  devices_per_host: 16", "topology.devices_per_host"),
    ],
)
def test_what_the_plan_needs_cannot_be_vaulted(section: str, old: str, key: str, copy: MakeCopy) -> None:
    found = copy("a3")
    name = key.rsplit(".", 1)[1]
    if old == "policy":
        change(found, section, "    backend_port: 8100\n", f"    backend_port: 8100\n    policy: {VAULT}")
    else:
        change(found, section, old, f"{'  ' * old.startswith('  ')}{name}: {VAULT.rstrip()}")
    result = checked(found)
    assert result.exit_code == 2
    assert "C02" in result.stderr and key in result.stderr and "vaulted, but the plan needs it" in result.stderr
    assert not any(secret in result.output for secret in SECRETS)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (VAULT, "unknown key"),
        ("!vault |\n          67656865696d\n", "`ansible-vault encrypt_string` did not write"),
        ("|\n" + VAULT.split("\n", 1)[1], "without the tag !vault"),
        (f"[1, {VAULT.split()[2]}]\n", "without the tag !vault"),
        ("!vault [67656865696d]\n", "the tag !vault is not read here"),
    ],
)
def test_a_wrong_vault_is_refused_without_showing_it(value: str, said: str, copy: MakeCopy) -> None:
    key = "ansible_pass" if value == VAULT else "ansible_user"
    found = change(copy("a3"), "hosts", "      nic: eth0\n", f"      nic: eth0\n      {key}: {value}")
    for words in ((), ("--json",)):
        result = checked(found, *words)
        assert (result.exit_code, said in result.stderr) == (2, True), result.stderr
        assert not any(secret in result.output for secret in (*SECRETS[1:], "67656865696d"))


def test_the_shipped_files_are_one_thing_to_every_reader() -> None:
    for file in Path(api.inventories()).rglob("*.yml"):
        text = file.read_text()
        assert read(text) == yaml.safe_load(text) == YAML(typ="safe").load(text), file
