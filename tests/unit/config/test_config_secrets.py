"""Passwords in hosts.yml, written in plain text: they work, and no command shows one."""

import os
import subprocess
from collections.abc import Callable

import pytest
from inventory_copy import Copy
from typer.testing import CliRunner

from mtp_runtime.cli.main import app
from mtp_runtime.config import api

MakeCopy = Callable[[str], Copy]
SECRET = "tr0ub4dor"
KEYS = ("ansible_password", "ansible_become_password")


def mtpctl(found: Copy, *words: str) -> str:
    """Everything that a command prints."""
    result = CliRunner().invoke(app, [*words, "--inventories", str(found.root)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.output


def written(found: Copy, text: str) -> Copy:
    """The copy with a line at host p0."""
    file = found.file("hosts")
    file.write_text(file.read_text().replace("      nic: eth0\n", f"      nic: eth0\n      {text}\n", 1))
    return found


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", [SECRET, f"'{SECRET} {{x}} #1'", f'"{{{SECRET}"'])
def test_a_password_changes_nothing_and_is_not_shown(key: str, value: str, copy: MakeCopy) -> None:
    found = written(copy("a3"), f"{key}: {value}")
    assert api.plan("a3", found.root) == api.plan("a3")
    assert SECRET not in repr(api.load_checked("a3", found.root))
    for words in (
        *(("check",), ("check", "--json"), ("render",), ("render", "--json"), ("render", "--explain"), ("offline",)),
        *(("set", "mtp.num_speculative_tokens=2"), ("set", f"all.hosts.p0.{key}={SECRET}2"), ("diff",)),
        *(("set", f"all.hosts.p0.{key}={SECRET}3", "--json"), ("set", f"all.hosts.p1.{key}={SECRET}")),
        ("set", f"all.hosts.p0.{key}=null"),
    ):
        shown = mtpctl(found, words[0], "a3", *words[1:])
        assert shown and SECRET not in shown, words
    assert SECRET not in mtpctl(found, "init", "b3", "--from", "a3")


@pytest.mark.parametrize(
    "text",
    [
        f"ansible_password: [{SECRET}]",
        f"ansible_password: {{a: {SECRET}}}",
        "ansible_password: 73550123",
        f'ansible_password: "{{{{ {SECRET} }}}}"',
        f'ansible_password: "{SECRET}\\u200b"',
        # What looks like a word of YAML, or like a value that two readers take for two.
        *(f"ansible_password: {mark}{SECRET}" for mark in ("*", "!", "%", "@", "`", "|", ">")),
        f"ansible_password: &{SECRET}\n      ansible_become_password: &{SECRET}",
        "ansible_become_password: 73_550_123",
        "ansible_become_password: 0073550123",
        # Misspelt keys, a space left out.
        f"ansible_pasword: {SECRET}",
        "ansible_ssh_pass: 0073550123",
        f"ansible_password:{SECRET}",
    ],
)
def test_a_refused_password_is_not_shown(text: str, copy: MakeCopy) -> None:
    found = written(copy("a3"), text)
    for words in ((), ("--json",)):
        shown = mtpctl(found, "check", "a3", *words)
        assert f"{found.file('hosts')}" in shown
        assert not any(part in shown for part in (SECRET, "550123", "550_123")), shown


def test_a_host_that_is_nothing_but_a_password(copy: MakeCopy) -> None:
    found = copy("a3")
    text = found.file("hosts").read_text()
    start, end = text.index("    p1:\n"), text.index("    d0:\n")
    found.file("hosts").write_text(f"{text[:start]}    p1:\n      ansible_password:{SECRET}\n{text[end:]}")
    shown = mtpctl(found, "check", "a3")
    assert "all.hosts.p1: Input should be keys with their values, found (hidden)." in shown
    assert SECRET not in shown


def test_a_diff_hides_old_and_new_passwords_those_of_new_hosts_too(copy: MakeCopy) -> None:
    found = written(copy("a3"), f"ansible_password: {SECRET}")
    env = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    for words in (("init", "-q"), ("add", "-A"), (*who, "commit", "-q", "-m", "one")):
        subprocess.run(["git", *words], cwd=found.root, env=env, check=True)
    found.edit(
        {
            "hosts.all.hosts.p0.ansible_password": f"{SECRET}2",
            "hosts.all.hosts.m0": {"ansible_host": "192.0.2.31", "ansible_become_password": f"{SECRET}3"},
            "hosts.all.children.monitoring.hosts": {"m0": None},
        }
    )
    for words in ((), ("--json",)):
        shown = mtpctl(found, "diff", "a3", *words)
        assert SECRET not in shown and "all.hosts.p0.ansible_password" in shown and "(hidden)" in shown
    assert "ansible_become_password: (hidden)" in mtpctl(found, "diff", "a3")


def test_set_says_that_a_password_over_another_one_was_written(copy: MakeCopy) -> None:
    """Both look alike when hidden."""
    found = written(copy("a3"), f"ansible_password: {SECRET}")
    word = f"all.hosts.p0.ansible_password={SECRET}2"
    assert "all.hosts.p0.ansible_password: (hidden) -> (hidden)" in mtpctl(found, "set", "a3", word)
    assert f"{SECRET}2" in found.file("hosts").read_text()
    assert "unchanged" in mtpctl(found, "set", "a3", word)
