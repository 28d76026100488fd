"""The compressed causal mask: what it contains, that it is shared, and how another one is told from it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="attention tests run in the engine environment")

from mtp_runtime.attention.mask import SIZE, causal_mask, is_causal, is_shared  # noqa: E402

pytestmark = pytest.mark.engine

DTYPES = [torch.int8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
def test_ones_lie_strictly_above_the_diagonal(dtype: torch.dtype) -> None:
    mask = causal_mask(dtype)
    assert mask.shape == (2048, 2048) and mask.dtype == dtype
    assert mask[0].tolist() == [0] + [1] * 2047
    assert mask[2047].sum() == 0
    assert [int(mask[i, j]) for i, j in ((5, 4), (5, 5), (5, 6))] == [0, 0, 1]
    assert mask.sum() == 2048 * 2047 // 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_mask_a_dtype_and_device(dtype: torch.dtype) -> None:
    assert causal_mask(dtype) is causal_mask(dtype, "cpu") is causal_mask(dtype, torch.device("cpu"))
    assert causal_mask(dtype, "meta") is causal_mask(dtype, "meta") is not causal_mask(dtype)
    assert causal_mask(torch.int8) is not causal_mask(torch.bool)


def test_of_no_other_dtype() -> None:
    with pytest.raises(ValueError, match=r"int8 or bool, not torch\.float32"):
        causal_mask(torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("leading", [(), (1,), (1, 1)])
def test_an_equal_mask_is_recognised(dtype: torch.dtype, leading: tuple[int, ...]) -> None:
    mask = causal_mask(dtype).clone().view(*leading, SIZE, SIZE)
    assert is_causal(mask)
    assert not is_shared(mask)


def changed(row: int, column: int) -> torch.Tensor:
    mask = causal_mask().clone()
    mask[row, column] = 1 - mask[row, column]
    return mask


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(causal_mask().T, id="turned over"),
        pytest.param(1 - causal_mask(), id="0 = masked"),
        pytest.param(torch.ones(SIZE, SIZE, dtype=torch.int8).triu(0), id="the diagonal too"),
        pytest.param(torch.ones(SIZE, SIZE, dtype=torch.int8).triu(2), id="not beside the diagonal"),
        pytest.param(causal_mask() * 2, id="twos"),
        pytest.param(changed(0, 2047), id="a corner"),
        pytest.param(changed(1024, 1024), id="one element"),
        pytest.param(causal_mask().float(), id="float"),
        pytest.param(causal_mask().to(torch.uint8), id="uint8"),
        pytest.param(causal_mask()[:-1], id="a row less"),
        pytest.param(torch.ones(1024, 1024, dtype=torch.int8).triu(1), id="another size"),
        pytest.param(causal_mask().expand(2, SIZE, SIZE), id="a batch of masks"),
        pytest.param(causal_mask().view(1, 1, 1, SIZE, SIZE), id="three 1s before it"),
        pytest.param(causal_mask().view(-1), id="flat"),
    ],
)
def test_another_mask_is_not(mask: torch.Tensor) -> None:
    assert not is_causal(mask)
    assert not is_shared(mask)


def test_the_shared_mask_is_known_until_somebody_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtp_runtime.attention.mask._SHARED", {})
    with torch.inference_mode():
        mask = causal_mask()
        assert is_shared(mask) and is_causal(mask)
        mask[0, 0] = 1
        assert not is_shared(mask) and not is_causal(mask)
