"""Deploying again changes nothing, bad input changes nothing, and an MTP switch restarts what it touches."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_stack import CLUSTER, ROOT, SOURCE, Stack, changed, inventory_copy, make

pytestmark = pytest.mark.live
# topology.yml: the ports of prefill and decode, in file order
PORTS = re.findall(r"^    port: \d+$", (SOURCE / CLUSTER / "group_vars/all/topology.yml").read_text(), re.MULTILINE)


def test_deploy_ends_with_a_green_table(stack: Stack) -> None:
    for wanted in (
        "the canary is green",
        f"http://{stack.deployed.plan.front}/v1",
        "acceptance rate",
        "TPOT",
        "make validate",
    ):
        assert wanted in stack.output


def test_second_deploy_changes_nothing(stack: Stack) -> None:
    before = stack.pids()
    done = make("deploy", CLUSTER=CLUSTER)
    assert changed(done.stdout) == 0, done.stdout
    assert stack.pids() == before


def test_check_mode_is_clean(stack: Stack) -> None:
    before = stack.pids()
    done = make("plan", CLUSTER=CLUSTER)
    assert changed(done.stdout) == 0, done.stdout
    assert stack.pids() == before


@pytest.fixture
def held_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def refused(stack: Stack, inventories: Path, *wanted: str) -> None:
    """The deployment fails, names everything in `wanted`, and nothing was stopped, started or rewritten."""
    before, plan = stack.pids(), (stack.state / "plan.json").read_bytes()
    done = make("deploy", CLUSTER=CLUSTER, INVENTORIES=str(inventories), expect=2)
    text = re.sub(r"\s+", " ", done.stdout + done.stderr)
    for part in wanted:
        assert part in text, text[-3000:]
    assert changed(done.stdout) == 0
    assert stack.pids() == before
    assert (stack.state / "plan.json").read_bytes() == plan


def edit(file: Path, pattern: str, replacement: str) -> None:
    text, count = re.subn(pattern, replacement, file.read_text(), flags=re.MULTILINE)
    assert count == 1, f"{file}: {pattern} matches {count} times"
    file.write_text(text)


def test_port_held_by_another_program(stack: Stack, tmp_path: Path, held_port: int) -> None:
    edit(inventory_copy(tmp_path) / "serving.yml", r"^    port: \d+$", f"    port: {held_port}")
    refused(stack, tmp_path, "H10", "serving.yml", "serving.router.port", str(held_port))


@pytest.mark.parametrize(
    ("file", "pattern", "replacement", "wanted"),
    [
        ("mtp.yml", r"num_speculative_tokens: .*", "num_speculative_tokens: 16", "R03"),
        ("mtp.yml", r"num_speculative_tokens: .*", "num_speculative_tokens: one", "C02"),
        ("mtp.yml", r"^  method: .*", "  method: crystal_ball", "R19"),
        ("serving.yml", r"^  max_num_batched_tokens:", "  max_batched_tokens:", "C01"),
        ("topology.yml", PORTS[1], PORTS[0], "R30"),
    ],
    ids=["K=16", "wrong type", "unknown method", "unknown key", "two instances on one port"],
)
def test_bad_inventory(stack: Stack, tmp_path: Path, file: str, pattern: str, replacement: str, wanted: str) -> None:
    edit(inventory_copy(tmp_path) / file, pattern, replacement)
    refused(stack, tmp_path, wanted, file)


@pytest.fixture
def spoilt_weights(stack: Stack, tmp_path: Path) -> tuple[Path, Path]:
    """An inventory whose weights are a copy that the test may spoil: (inventories, weights folder)."""
    source, weights = ROOT / stack.deployed.weights, tmp_path / "weights"
    weights.mkdir()
    for path in source.iterdir():
        (weights / path.name).write_bytes(path.read_bytes())
    inventories = tmp_path / "inventories"
    model = inventory_copy(inventories) / "model.yml"
    edit(model, r"^  path: .*", f"  path: {weights}")
    edit(model, r"^  manifest: .*", f"  manifest: {weights}/manifest.json")
    return inventories, weights


def test_missing_weights(stack: Stack, spoilt_weights: tuple[Path, Path]) -> None:
    inventories, weights = spoilt_weights
    (weights / "model.safetensors").unlink()
    refused(stack, inventories, "H02", "model.safetensors")


def test_corrupted_weights(stack: Stack, spoilt_weights: tuple[Path, Path]) -> None:
    inventories, weights = spoilt_weights
    data = bytearray((weights / "model.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (weights / "model.safetensors").write_bytes(data)
    refused(stack, inventories, "H03", "model.safetensors")


def test_the_container_engine_is_refused_before_any_host_is_touched(stack: Stack) -> None:
    done = make("deploy", CLUSTER="a3", expect=2)
    assert "vllm-ascend" in done.stdout
    assert "Look at the host" not in done.stdout
    assert not (ROOT / ".local" / "clusters" / "a3").exists()


@pytest.mark.parametrize(
    "arguments", [{}, {"CLUSTER": "nowhere"}, {"CLUSTER": CLUSTER, "K": "x"}, {"CLUSTER": CLUSTER}]
)
def test_mtp_says_what_is_missing(arguments: dict[str, str]) -> None:
    done = make("mtp", expect=2, **arguments)
    assert "error: " in done.stderr
    assert "there are: " in done.stderr or "K=n" in done.stderr
