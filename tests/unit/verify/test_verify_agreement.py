"""The fast, batched forms emit exactly what the readable one-request forms emit, ragged batches included."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="verification tests run in the engine environment")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from verify_steps import emitted, steps, tensors  # noqa: E402

from mtp_runtime.verify import reference, verify_block, verify_exact, verify_tokenwise  # noqa: E402
from mtp_runtime.verify.recover import TILE  # noqa: E402

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("name", ["tokenwise", "block"])
@given(step=steps(), padding=st.sampled_from([0, 0, 3 * TILE, 2 * TILE + 7]))
@settings(max_examples=400, deadline=None)
def test_stochastic_forms_agree(name: str, step: dict, padding: int) -> None:
    """Also where the probable tokens lie in a later tile, or in an incomplete one."""
    fast = {"tokenwise": verify_tokenwise, "block": verify_block}[name]
    slow = getattr(reference, name)
    expected = [slow(r["drafts"], r["p"], r["q"], r["accept"], r["pick"]) for r in step["requests"]]
    verdict = fast(*tensors(step, padding))
    assert emitted(verdict, max(padding - step["vocab"], 0)) == expected


@given(steps())
@settings(max_examples=200, deadline=None)
def test_exact_forms_agree(step: dict) -> None:
    batch, *_ = tensors(step)
    chosen = torch.tensor([x for r in step["requests"] for x in r["chosen"]], dtype=torch.int64)
    expected = [reference.exact(r["drafts"], r["chosen"]) for r in step["requests"]]
    assert emitted(verify_exact(batch, chosen)) == expected
