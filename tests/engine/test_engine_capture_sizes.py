"""Graph sizes that could not serve: vLLM rounds or drops them, the engine refuses to start with them."""

from __future__ import annotations

import pytest
from engine_arms import Arm, start

pytestmark = pytest.mark.engine


def sizes(*given: int) -> dict:
    """Engine arguments of whole-step graphs with these sizes."""
    modes = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    return {"compilation_config": {**modes, **({"cudagraph_capture_sizes": list(given)} if given else {})}}


REFUSED = {
    # vLLM makes [6, 9] of them: no step of more than 3 requests would find a graph.
    "no multiples": (2, sizes(4, 8, 10), "cudagraph_capture_sizes: 4, 8, 10: no multiple of K + 1 = 3 (K = 2)"),
    "vLLM's own": (2, sizes(), "no multiple of K + 1 = 3 (K = 2); for 16 requests use [3, 6, 12, 24, 48]"),
    "cut off": (
        3,
        {**sizes(4, 8, 16, 32, 64), "max_num_batched_tokens": 40},
        "max_num_batched_tokens 40: less than the 64 tokens of a full batch at K = 3",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_sizes_that_cannot_serve_are_refused(case: str) -> None:
    """va#6524, va#3909, vLLM#37865: the error names the sizes and K."""
    k, engine, message = REFUSED[case]
    # enforce_eager, which arms have, would switch graphs off.
    [result] = start([Arm(k, max_num_seqs=16, engine={"enforce_eager": False, **engine})])
    assert message in result["error"]
