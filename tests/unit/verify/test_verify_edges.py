"""Cases a distribution test cannot see: zero probabilities, U at its ends, placeholders, odd shapes, inputs kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch", reason="verification tests run in the engine environment")

from mtp_runtime.verify import (  # noqa: E402
    PLACEHOLDER,
    STRATEGIES,
    DraftBatch,
    Noise,
    Verdict,
    keyed,
    to_rows,
    verify_block,
    verify_exact,
    verify_greedy,
    verify_mixed,
    verify_tokenwise,
)
from mtp_runtime.verify.recover import TILE, draw  # noqa: E402

pytestmark = pytest.mark.engine

ALMOST_ONE = 1 - 2**-53
METHODS = pytest.mark.parametrize("verify", [verify_tokenwise, verify_block])
MODES = pytest.mark.parametrize("with_probs", [False, True], ids=["one-hot", "probabilities"])
VOCABULARIES = [1, 2, 7, TILE - 1, TILE, TILE + 1, 3 * TILE, 3 * TILE + 7]


def batch_of(drafts: list[int], counts: list[int]) -> DraftBatch:
    """Short form."""
    return DraftBatch.of(torch.tensor(drafts, dtype=torch.int32), counts)


def noise(accept: list[float], pick: list[float]) -> Noise:
    """Short form."""
    return Noise(torch.tensor(accept, dtype=torch.float64), torch.tensor(pick, dtype=torch.float64))


def one_hot(tokens: list[int], vocab: int) -> torch.Tensor:
    """[N, V] certain of a token each."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocab).float()


# Acceptance at the ends of U.


@METHODS
@MODES
def test_impossible_draft_is_rejected_at_u_zero(verify: Callable, with_probs: bool) -> None:
    p = torch.tensor([[0.0, 0.25, 0.75], [0.0, 0.0, 1.0]])
    q = one_hot([0], 3) if with_probs else None
    verdict = verify(batch_of([0], [1]), p, q, noise([0.0], [0.5]))
    assert verdict.tokens.tolist() == [[2, PLACEHOLDER]]
    assert verdict.accepted.tolist() == [0]


@METHODS
@MODES
def test_certain_draft_is_accepted_at_the_largest_u(verify: Callable, with_probs: bool) -> None:
    """Also where the drafter was less sure of it than the target."""
    q = torch.tensor([[0.5, 0.5, 0.0]]) if with_probs else None
    verdict = verify(batch_of([1], [1]), one_hot([1, 2], 3), q, noise([ALMOST_ONE], [0.5]))
    assert verdict.tokens.tolist() == [[1, 2]]


@METHODS
def test_draft_its_drafter_calls_impossible_is_rejected(verify: Callable) -> None:
    """It cannot have been drawn from q; accepting it would be a guess."""
    p, q = torch.tensor([[0.5, 0.5], [0.5, 0.5]]), torch.tensor([[1.0, 0.0]])
    assert verify(batch_of([1], [1]), p, q, noise([0.0], [0.5])).tokens.tolist() == [[1, PLACEHOLDER]]


@METHODS
def test_draft_its_drafter_calls_all_but_impossible_is_accepted(verify: Callable) -> None:
    """p / q passes the largest float32 here."""
    p, q = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([[1.0, 1e-42]])
    assert verify(batch_of([1], [1]), p, q, noise([ALMOST_ONE], [0.5])).tokens.tolist() == [[1, 0]]


# The token drawn after a rejection.


@METHODS
def test_residual_of_a_near_certain_draft_is_exact(verify: Callable) -> None:
    """Beside the draft lies 1e-7, three parts to one, in another tile and in its own: no difference of sums sees it."""
    vocab, draft, other = 3 * TILE + 7, 5, TILE + 2
    for second in (other + 1, draft + 1):
        row = torch.zeros(vocab)
        row[draft], row[min(other, second)], row[max(other, second)] = 1 - 2.0**-23, 0.75e-7, 0.25e-7
        shares = row.clone()
        shares[draft] = 0
        picks = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
        p = torch.stack((row, one_hot([0], vocab)[0])).repeat(1000, 1)
        steps = Noise(torch.full((1000,), ALMOST_ONE, dtype=torch.float64), picks)
        verdict = verify(batch_of([draft] * 1000, [1] * 1000), p, None, steps)
        assert verdict.accepted.sum() == 0
        counts = torch.bincount(verdict.tokens[:, 0], minlength=vocab)
        assert (counts - shares.double() / shares.double().sum() * 1000).abs().max() <= 1


@METHODS
def test_one_hot_recovery_never_repeats_the_draft(verify: Callable) -> None:
    p = torch.tensor([[0.999, 0.001], [0.5, 0.5]]).repeat(5000, 1)
    picks = torch.rand(5000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    verdict = verify(
        batch_of([0] * 5000, [1] * 5000), p, None, Noise(torch.full((5000,), 0.9999, dtype=torch.float64), picks)
    )
    assert verdict.accepted.sum() == 0
    assert (verdict.tokens[:, 0] == 1).all()


@METHODS
def test_certain_draft_rejected_through_rounding_is_emitted_all_the_same(verify: Callable) -> None:
    """Softmax may say 1 - 2^-24 and leave nothing beside it: then nothing but the draft can come."""
    p = torch.tensor([[1 - 2.0**-24, 0.0], [0.0, 1.0]])
    verdict = verify(batch_of([0], [1]), p.clone(), None, noise([ALMOST_ONE], [0.5]))
    assert verdict.tokens.tolist() == [[0, PLACEHOLDER]]
    verdict = verify(batch_of([0], [1]), p.clone(), one_hot([0], 2), noise([ALMOST_ONE], [0.5]))
    assert verdict.tokens.tolist() == [[0, PLACEHOLDER]]


@pytest.mark.parametrize("vocab", [*VOCABULARIES, 129_280])
def test_draw_inverts_the_cumulative_sum(vocab: int) -> None:
    """N evenly spaced numbers must give each token its share to within two; half of the tokens have none."""
    generator = torch.Generator().manual_seed(vocab)
    row = torch.rand(vocab, generator=generator).pow(8) * (torch.rand(vocab, generator=generator) < 0.5)
    row[vocab // 2] = 0.5
    count = 20_000 if vocab < 100_000 else 50
    points = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens = draw(row.expand(count, vocab), points)
    assert (tokens.diff() >= 0).all()
    assert (row[tokens] > 0).all()
    shares = row.double() / row.double().sum()
    assert (torch.bincount(tokens, minlength=vocab) - shares * count).abs().max() <= 2
    ends = draw(row.expand(2, vocab), torch.tensor([0.0, ALMOST_ONE], dtype=torch.float64))
    possible = row.nonzero()[:, 0]
    assert ends.tolist() == [possible[0], possible[-1]]


@pytest.mark.parametrize("first", [TILE, 2 * TILE - 1, 3 * TILE + 5])
def test_draw_passes_over_empty_tiles(first: int) -> None:
    """Before the first possible token, and between the two there are."""
    row = torch.zeros(8 * TILE + 3)
    row[first], row[7 * TILE] = 0.25, 0.75
    points = torch.tensor([0.0, 0.2499, 0.25, ALMOST_ONE], dtype=torch.float64)
    assert draw(row.expand(4, -1), points).tolist() == [first, first, 7 * TILE, 7 * TILE]


# Real rows: logits of any precision, masks, vocabularies that fit no tile.


def rows_of(count: int, vocab: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Softmax of random logits, most of them masked, some peaked."""
    logits = torch.randn(count, vocab, generator=generator) * torch.rand(count, 1, generator=generator) * 8
    masked = torch.rand(count, vocab, generator=generator) < 0.7
    masked.scatter_(1, torch.randint(vocab, (count, 1), generator=generator), False)
    return logits.to(dtype).masked_fill_(masked, -torch.inf).softmax(-1, dtype=torch.float32)


def check(
    batch: DraftBatch, p: torch.Tensor, q: torch.Tensor | None, steps: Noise, verdict: Verdict, block: bool
) -> int:
    """Every emitted token must be possible, and the last one lie where its random number points. Returns rejections."""
    start = rejected = 0
    for b, count in enumerate(batch.counts.tolist()):
        drafts = batch.tokens[start : start + count].tolist()
        taken = int(verdict.accepted[b])
        row = verdict.tokens[b].tolist()
        first = start + b
        assert row[:taken] == drafts[:taken]
        assert row[taken + 1 :] == [PLACEHOLDER] * (batch.width - taken)
        assert all(p[first + i, token] > 0 for i, token in enumerate(row[: taken + 1]))
        weights = p[first + taken].double()
        if taken < count and drafts[taken] >= 0:
            rejected += 1
            if q is None:
                weights[drafts[taken]] = 0
            else:
                scale = 1.0
                for i, token in enumerate(drafts[:taken] if block else []):
                    scale = min(scale * float(p[first + i, token]) / float(q[start + i, token]), 1.0)
                weights = (weights.float() * scale - q[start + taken]).clamp(min=0).double()
        if weights.sum() > 1e-4:
            assert weights[row[taken]] > 0
            point = float(steps.pick[b]) * float(weights.sum())
            below = float(weights[: row[taken]].sum())
            assert below - 1e-5 <= point <= below + float(weights[row[taken]]) + 1e-5
        start += count
    return rejected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", VOCABULARIES)
@MODES
def test_masked_rows_of_any_vocabulary(with_probs: bool, vocab: int, dtype: torch.dtype) -> None:
    """Ragged, placeholders among the drafts, q > 0 where p = 0, random numbers at their ends as often as between."""
    verify_rows(with_probs, vocab, dtype, size=40)


@MODES
def test_masked_rows_of_a_real_vocabulary(with_probs: bool) -> None:
    verify_rows(with_probs, 129_280, torch.bfloat16, size=4)


def verify_rows(with_probs: bool, vocab: int, dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    counts = (torch.arange(size) % 5).tolist()
    total = sum(counts)
    p = rows_of(total + size, vocab, dtype, generator)
    q = rows_of(total, vocab, dtype, generator)
    # Near the target, so that drafts are accepted, and wrong where the target has zeros.
    bare = DraftBatch.of(torch.zeros(total, dtype=torch.int32), counts)
    q = 0.7 * p[bare.draft_rows] + 0.3 * q
    drafts = torch.multinomial(q, 1, generator=generator)[:, 0]
    drafts = torch.where(torch.rand(total, generator=generator) < 0.1, PLACEHOLDER, drafts).int()
    batch = DraftBatch.of(drafts, counts)
    for verify in (verify_tokenwise, verify_block):
        steps = Noise.drawn(batch, generator)
        for numbers in (steps.accept, steps.pick):
            end = torch.rand(numbers.shape, generator=generator)
            numbers[end < 0.25], numbers[end > 0.75] = 0.0, ALMOST_ONE
        given = q if with_probs else None
        verdict = verify(batch, p.clone(), given, steps)
        rejected = check(batch, p, given, steps, verdict, verify is verify_block)
        assert vocab == 1 or size < 10 or (rejected > 0 and verdict.accepted.sum() > 0)


# Placeholders.


@METHODS
@MODES
@pytest.mark.parametrize("even", [True, False])
def test_placeholders_are_never_accepted(verify: Callable, with_probs: bool, even: bool) -> None:
    """At U = 0 every possible draft is accepted, up to the first placeholder; there p alone decides."""
    drafts, counts = ([-1, -1, -1, 0, 0, -1], [2, 2, 2]) if even else ([-1, -1, 0, 0, -1, 0], [2, 1, 0, 3])
    batch = batch_of(drafts, counts)
    p = one_hot([0], 2).repeat(batch.total + batch.size, 1)
    q = torch.full((batch.total, 2), 0.5) if with_probs else None
    verdict = verify(batch, p, q, noise([0.0] * batch.total, [ALMOST_ONE] * batch.size))
    assert verdict.accepted.tolist() == ([0, 0, 1] if even else [0, 1, 0, 1])
    assert verdict.tokens.max() == 0


@pytest.mark.parametrize("even", [True, False])
def test_placeholders_equal_no_chosen_token(even: bool) -> None:
    drafts, counts = ([-1, 3, 3, -1], [2, 2]) if even else ([-1, 3, -1], [1, 2])
    batch = batch_of(drafts, counts)
    rows = batch.total + batch.size
    for verdict in (
        verify_exact(batch, torch.full((rows,), 3)),
        verify_greedy(batch, one_hot([3] * rows, 5)),
        verify_exact(batch, keyed.race(one_hot([3] * rows, 5), torch.arange(rows), torch.arange(rows))),
    ):
        assert verdict.accepted.tolist() == [0, 1]
        assert verdict.tokens.tolist() == [[3, -1, -1], [3, 3, -1]]


# Shapes.


@METHODS
@MODES
@pytest.mark.parametrize("width", [0, 3])
def test_requests_without_drafts_take_the_bonus_token(verify: Callable, with_probs: bool, width: int) -> None:
    """The width is a bound: it may be more than any request has, here where none has any."""
    batch = DraftBatch(torch.empty(0, dtype=torch.int32), torch.tensor([0, 0]), width)
    rest = [PLACEHOLDER] * width
    q = torch.empty(0, 7) if with_probs else None
    assert verify(batch, one_hot([5, 6], 7), q, noise([], [0.5, 0.5])).tokens.tolist() == [[5, *rest], [6, *rest]]
    assert verify_exact(batch, torch.tensor([5, 6])).tokens.tolist() == [[5, *rest], [6, *rest]]


@METHODS
@MODES
def test_a_width_above_every_count_only_pads(verify: Callable, with_probs: bool) -> None:
    tokens, cumulative = torch.tensor([1, 0, 1], dtype=torch.int32), torch.tensor([1, 1, 3], dtype=torch.int32)
    p = torch.tensor([[0.4, 0.6]]).repeat(6, 1)
    q = torch.tensor([[0.7, 0.3]]).repeat(3, 1) if with_probs else None
    numbers = noise([0.1, 0.2, 0.9], [0.1, 0.9, 0.5])
    exact = verify(DraftBatch(tokens, cumulative, 2), p.clone(), q, numbers).tokens
    padded = verify(DraftBatch(tokens, cumulative, 4), p.clone(), q, numbers).tokens
    assert torch.equal(padded[:, :3], exact)
    assert (padded[:, 3:] == PLACEHOLDER).all()


@METHODS
@MODES
def test_an_empty_batch_is_no_error(verify: Callable, with_probs: bool) -> None:
    batch = DraftBatch(torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int64), 2)
    empty = torch.empty(0, 9)
    assert verify(batch, empty, empty if with_probs else None, noise([], [])).tokens.shape == (0, 3)
    assert verify_greedy(batch, empty).tokens.shape == (0, 3)


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="sum to 3"):
        batch_of([1, 2], [1, 2])
    with pytest.raises(ValueError, match="at most 1"):
        DraftBatch(torch.tensor([1, 2, 3]), torch.tensor([1, 3]), 1)
    with pytest.raises(ValueError, match=r"need \[T\], \[B\]"):
        DraftBatch(torch.tensor([[1, 2]]), torch.tensor([2]), 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64], ids=str)
def test_request_values_reach_every_row(dtype: torch.dtype) -> None:
    """Even and ragged, a request without drafts among them."""
    values = torch.tensor([4, 0, 6, 9], dtype=dtype)
    even = to_rows(batch_of([0] * 8, [2, 2, 2, 2]), values)
    assert even.tolist() == [4, 4, 4, 0, 0, 0, 6, 6, 6, 9, 9, 9]
    ragged = to_rows(batch_of([0] * 6, [2, 1, 0, 3]), values)
    assert ragged.tolist() == [4, 4, 4, 0, 0, 6, 9, 9, 9, 9]
    assert even.dtype == ragged.dtype == dtype


def test_mixed_batch_gives_each_request_its_own_method() -> None:
    """The greedy request takes the argmax where the other one, with the same numbers, accepts by chance."""
    p = torch.tensor([[0.6, 0.4]]).repeat(4, 1)
    verdict = verify_mixed(
        batch_of([1, 1], [1, 1]),
        p.argmax(1),
        torch.tensor([True, False]),
        p,
        None,
        noise([0.3, 0.3], [0.5, 0.5]),
        verify_tokenwise,
    )
    assert verdict.tokens.tolist() == [[0, PLACEHOLDER], [1, 0]]
    assert verdict.accepted.tolist() == [0, 1]


def test_every_named_method_is_there() -> None:
    from mtp_runtime.choice import METHODS as NAMES

    assert tuple(STRATEGIES) == NAMES


# What the caller handed in.


@METHODS
@MODES
@pytest.mark.parametrize("even", [True, False])
def test_inputs_other_than_the_scratch_memory_are_kept(verify: Callable, with_probs: bool, even: bool) -> None:
    """Drafts, counts, q and the random numbers; p is scratch memory, as the docstring says."""
    assert "scratch" in verify_tokenwise.__doc__
    assert "verify_tokenwise" in verify_block.__doc__
    generator = torch.Generator().manual_seed(1)
    counts = [2, 2, 2] if even else [2, 0, 1]
    total = sum(counts)
    batch = DraftBatch.of(torch.randint(-1, 600, (total,), generator=generator).int(), counts)
    p = rows_of(total + 3, 600, torch.float32, generator)
    q = rows_of(total, 600, torch.float32, generator) if with_probs else None
    steps = Noise.drawn(batch, generator)
    kept = [batch.tokens, batch.cumulative, steps.accept, steps.pick, *([] if q is None else [q])]
    before = [tensor.clone() for tensor in kept]
    verify(batch, p, q, steps)
    assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("counts", [[1, 1], [1, 0]], ids=["even", "ragged"])
def test_chosen_tokens_are_kept(counts: list[int], dtype: torch.dtype) -> None:
    """The output must not share memory with what the caller still reads."""
    batch = batch_of([1] * sum(counts), counts)
    chosen = torch.full((batch.total + batch.size,), 5, dtype=dtype)
    verdict = verify_exact(batch, chosen)
    verdict.tokens.fill_(9)
    assert (chosen == 5).all()


def test_logits_and_raced_probabilities_are_kept() -> None:
    batch, logits = batch_of([1, 1], [1, 1]), torch.randn(4, 9, generator=torch.Generator().manual_seed(2))
    before, key = logits.clone(), torch.arange(4)
    verify_greedy(batch, logits)
    keyed.race(logits, key, key)
    assert torch.equal(logits, before)
    assert torch.equal(key, torch.arange(4))
