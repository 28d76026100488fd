"""Graph sizes from the command line to the dispatcher: what the engine loses on the way, and that ours arrive."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import cpu_runner
import pytest
from patching import applied
from vllm.config import CUDAGraphMode

from mtp_runtime.adapters.settings import settings
from mtp_runtime.adapters.vllm_ascend import graph_sizes, padding, slack
from mtp_runtime.graphs.slots import slots_for

STOCK = """
import json, cpu_runner
from vllm.config import CUDAGraphMode
found = []
for k, requests, sizes in ((1, 16, [36]), (2, 14, [])):
    made = cpu_runner.configuration(k, requests, sizes=sizes)
    configured = made.compilation_config.cudagraph_capture_sizes
    runner = cpu_runner.make_runner(made)
    cpu_runner.give_attention(runner)
    keys = runner.cudagraph_dispatcher.cudagraph_keys[CUDAGraphMode.FULL]
    full = cpu_runner.Step(runner, [k + 1] * requests, [20] * requests)
    found.append([configured, sorted(key.num_tokens for key in keys), full.mode.name])
print("found", json.dumps(found))
"""


@pytest.fixture
def padded(request: pytest.FixtureRequest) -> Iterator[None]:
    """MTP_PADDING as the test's parameter says."""
    with patch.dict(os.environ, {"MTP_PADDING": request.param}):
        settings.cache_clear()
        yield
    settings.cache_clear()


SLACK = pytest.mark.parametrize("padded", ["slack"], indirect=True)
PLACEHOLDER = pytest.mark.parametrize("padded", ["placeholder"], indirect=True)


def sizes_of(vllm_config: Any) -> list[int]:
    compilation = vllm_config.compilation_config
    assert compilation.max_cudagraph_capture_size == max(compilation.cudagraph_capture_sizes)
    return list(compilation.cudagraph_capture_sizes)


def captured(vllm_config: Any) -> tuple[Any, list[int]]:
    """A worker's runner, and what it will capture for whole decode steps, tokens."""
    made = cpu_runner.make_runner(vllm_config)
    cpu_runner.give_attention(made)
    described = [
        descriptor.num_tokens
        for mode, descriptors in made.cudagraph_dispatcher.get_capture_descs()
        for descriptor in descriptors
        if mode == CUDAGraphMode.FULL
    ]
    return made, sorted(described)


def test_what_the_engine_loses() -> None:
    """Without our patches, and without a word: slack's only graph; the full batch's graph where 42 is the maximum."""
    environment = os.environ | {"MTP_PATCHES": "none", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", STOCK], capture_output=True, text=True, env=environment)
    line = next((line for line in done.stdout.splitlines() if line.startswith("found ")), None)
    assert line, done.stderr
    slack_graph, maximum_42 = json.loads(line.removeprefix("found "))
    assert slack_graph == [[36], [], "NONE"]
    assert maximum_42 == [[1, 2, 4, 8, 16, 24, 32, 40], [3, 6, 9, 18, 24, 33], "NONE"]


@SLACK
@pytest.mark.usefixtures("padded")
@pytest.mark.parametrize(("k", "requests"), [(1, 16), (2, 16), (3, 4), (7, 16), (1, 128)])
@pytest.mark.parametrize("written", [True, False])
def test_slack_ends_with_the_planner_s_size(k: int, requests: int, written: bool) -> None:
    """Written as rendered, or left to the engine."""
    wanted = slots_for(requests, k)
    made = cpu_runner.configuration(k, requests, sizes=[wanted.tokens] if written else [])
    assert sizes_of(made) == [wanted.tokens]
    assert made.scheduler_config.max_num_seqs == requests


def test_the_example() -> None:
    assert (slots_for(16, 1).slots, slots_for(16, 1).tokens) == (18, 36)


@SLACK
@pytest.mark.usefixtures("padded")
def test_slack_s_graph_is_captured_with_all_its_slots() -> None:
    made = cpu_runner.configuration(1, 16, "--max-num-batched-tokens", "36", sizes=[36])
    with applied(padding.PATCH):
        runner, found = captured(made)
    assert sizes_of(made) == found == [36]
    assert {key.num_reqs for key in runner.cudagraph_dispatcher.cudagraph_keys[CUDAGraphMode.FULL]} == {18}
    # The scheduler's configuration still counts requests.
    assert (made.scheduler_config.max_num_seqs, runner.scheduler_config.max_num_seqs) == (16, 18)


@SLACK
@pytest.mark.usefixtures("padded")
def test_slack_s_graph_lost_after_all_is_refused() -> None:
    """What comes between the configuration and the capture: here a size is put in by hand."""
    made = cpu_runner.configuration(1, 16, sizes=[36])
    made.compilation_config.cudagraph_capture_sizes = [32]
    made.compilation_config.max_cudagraph_capture_size = 32
    with applied(padding.PATCH), pytest.raises(slack.SlackRefused, match=r"of \[32\] tokens.*36 \(18 slots, R05\)"):
        captured(made)


@SLACK
@pytest.mark.usefixtures("padded")
def test_what_slack_cannot_have() -> None:
    with pytest.raises(Exception, match=r"max_num_batched_tokens 34: less than the 36 tokens.*\(R06\); use 36 or more"):
        cpu_runner.configuration(1, 16, "--max-num-batched-tokens", "34", sizes=[32])
    with pytest.raises(Exception, match=r"K = 15.*\(R21\)"):
        cpu_runner.configuration(15, 2, sizes=[32])
    with pytest.raises(Exception, match=r"cudagraph_mode FULL_AND_PIECEWISE.*use graph_mode: full"):
        cpu_runner.configuration(1, 16, sizes=[36], mode="FULL_AND_PIECEWISE")
    made = cpu_runner.configuration(1, 16, sizes=[36])
    with (
        patch.dict(os.environ, {"MTP_PATCHES": "graph_sizes"}),
        pytest.raises(graph_sizes.SizesRefused, match="without"),
    ):
        graph_sizes.sizes(made)


@SLACK
@pytest.mark.usefixtures("padded")
def test_slack_needs_the_attention_that_it_was_made_for() -> None:
    """AscendMLACPImpl gives captured calls other KV lengths and keeps their query lengths; others are not patched."""
    with pytest.raises(Exception, match=r"slack with context parallelism; use mtp\.padding: placeholder"):
        cpu_runner.configuration(1, 16, "--tensor-parallel-size", "2", "--decode-context-parallel-size", "2")
    made = cpu_runner.configuration(1, 16, sizes=[36])
    with (
        patch.object(type(made.model_config), "use_mla", False),
        pytest.raises(graph_sizes.SizesRefused, match="slack with a model without MLA"),
    ):
        graph_sizes.sizes(made)
    with (
        patch.object(made.model_config.hf_text_config, "index_topk", 2048, create=True),
        pytest.raises(graph_sizes.SizesRefused, match="slack with sparse attention"),
    ):
        graph_sizes.sizes(made)


@PLACEHOLDER
@pytest.mark.usefixtures("padded")
@pytest.mark.parametrize(
    ("k", "requests", "written", "ends"),
    [
        (2, 14, [], [3, 6, 9, 18, 24, 33, 42]),  # left to the engine
        (2, 14, [3, 42], [3, 42]),
        (1, 16, [36], [32]),  # above max_num_seqs x (K + 1) nothing is captured
        (1, 16, [2, 4, 8, 16, 32], [2, 4, 8, 16, 32]),
    ],
)
def test_each_size_is_captured_and_each_step_has_a_graph(
    k: int, requests: int, written: list[int], ends: list[int]
) -> None:
    made = cpu_runner.configuration(k, requests, sizes=written)
    with applied(padding.PATCH):
        runner, found = captured(made)
        assert sizes_of(made) == found == ends
        for count in range(1, requests + 1):
            step = cpu_runner.Step(runner, [k + 1] * count, [20] * count)
            assert step.mode == CUDAGraphMode.FULL
            assert step.descriptor.num_tokens == min(size for size in ends if size >= count * (k + 1))


@PLACEHOLDER
@pytest.mark.usefixtures("padded")
def test_sizes_of_other_modes_are_the_engine_s() -> None:
    """Pieces take prompts too: sizes there are no n x (K + 1) of a full batch."""
    made = cpu_runner.configuration(2, 14, mode="PIECEWISE")
    assert sizes_of(made) == [1, 2, 4, 8, 16, 24, 32, 40]
