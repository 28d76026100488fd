"""Keyed random numbers: uniform, independent in every direction, and the same wherever they are drawn.

Chi-square at ALPHA = 1e-4, N = 500 000 numbers in 256 bins, pairs in 16 x 16 bins: finds a total variation of 1 % with
a probability of 0.99. Races: N = 300 000, against p exactly.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="verification tests run in the engine environment")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from verify_statistics import ALPHA, chi_square, race_agreement  # noqa: E402

from mtp_runtime.verify import PLACEHOLDER, DraftBatch, keyed, to_rows, verify_exact  # noqa: E402

pytestmark = pytest.mark.engine

MANY = 500_000
STREAMS = (keyed.ACCEPT, keyed.PICK, keyed.RACE, keyed.DRAFT)
LARGE = -(1 << 62) + 12345


def fixed(value: int, count: int = MANY) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.int64)


COUNTING = torch.arange(MANY)
SERIES = {
    "positions-of-a-key": (fixed(7), COUNTING),
    "positions-of-key-0": (fixed(0), COUNTING),
    "positions-of-a-large-key": (fixed(LARGE), COUNTING),
    "late-positions": (fixed(7), COUNTING + (1 << 31) - MANY // 2),
    "keys-in-sequence": (COUNTING, fixed(0)),
    "keys-of-high-bits": (COUNTING << 32, fixed(3)),
    "keys-and-positions": (COUNTING // 1000, COUNTING % 1000),
}


def bins(numbers: torch.Tensor, count: int) -> torch.Tensor:
    return (numbers * count).long()


def p_of_uniform(numbers: torch.Tensor) -> float:
    observed = torch.bincount(bins(numbers, 256), minlength=256)
    return chi_square(observed, torch.full((256,), len(numbers) / 256))


def p_of_independent(a: torch.Tensor, b: torch.Tensor) -> float:
    observed = torch.bincount(bins(a, 16) * 16 + bins(b, 16), minlength=256)
    return chi_square(observed, torch.full((256,), len(a) / 256))


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("series", SERIES)
def test_numbers_are_uniform_and_neighbours_independent(series: str, stream: int) -> None:
    """Also at lag 2 and 3: what the drafts of one step would share."""
    numbers = keyed.uniform(*SERIES[series], stream)
    assert p_of_uniform(numbers) > ALPHA
    for lag in (1, 2, 3):
        assert p_of_independent(numbers[:-lag], numbers[lag:]) > ALPHA


@pytest.mark.parametrize("series", ["positions-of-a-key", "keys-and-positions"])
def test_streams_are_independent(series: str) -> None:
    numbers = [keyed.uniform(*SERIES[series], stream) for stream in STREAMS]
    for i, a in enumerate(numbers):
        for b in numbers[:i]:
            assert p_of_independent(a, b) > ALPHA


@pytest.mark.parametrize("other", [8, 6, 7 + (1 << 31), 7 + (1 << 32), 7 - (1 << 63), -7, 7 << 16])
def test_keys_are_independent(other: int) -> None:
    """Keys that differ in one bit, in the high word, in sign."""
    a = keyed.uniform(fixed(7), COUNTING, keyed.ACCEPT)
    b = keyed.uniform(fixed(other), COUNTING, keyed.ACCEPT)
    assert p_of_independent(a, b) > ALPHA


def test_numbers_have_53_bits_and_stay_below_one() -> None:
    """In float32 one number in 2^25 would round to 1, and the low bits would all be 0."""
    for start in range(0, 3 * MANY, MANY):
        numbers = keyed.uniform(COUNTING + start, fixed(0), keyed.ACCEPT)
        assert numbers.dtype == torch.float64
        assert 0 <= numbers.min() < numbers.max() < 1
        assert p_of_uniform((numbers * 2**45) % 1) > ALPHA


def test_numbers_do_not_depend_on_the_default_dtype() -> None:
    """Engines set it to bfloat16 while they build a model."""
    key = torch.arange(1000)
    wanted = keyed.uniform(key, key, keyed.PICK)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(keyed.uniform(key, key, keyed.PICK), wanted)
    finally:
        torch.set_default_dtype(torch.float32)


# Races.

ROW = torch.tensor([0.35, 0.0, 0.2, 1e-3, 0.05, 0.3, 0.0, 0.099])
RACES = {
    "positions-of-a-key": (fixed(7, 300_000), torch.arange(300_000)),
    "keys-in-sequence": (torch.arange(300_000), fixed(5, 300_000)),
    "keys-and-positions": (torch.arange(300_000) // 500 - 300, torch.arange(300_000) % 500),
}


@pytest.mark.parametrize("series", RACES)
def test_race_follows_p(series: str) -> None:
    """Zeros never win; a token of one in a thousand wins as often as it should; neighbours are independent."""
    tokens = keyed.race(ROW.expand(300_000, -1), *RACES[series])
    expected = ROW.double() / ROW.double().sum()
    assert chi_square(torch.bincount(tokens, minlength=8), expected * 300_000) > ALPHA
    pairs = torch.bincount(tokens[:-1] * 8 + tokens[1:], minlength=64)
    assert chi_square(pairs, (expected[:, None] * expected).flatten() * 299_999) > ALPHA


def test_race_follows_p_over_a_real_vocabulary() -> None:
    """Sixteen groups of tokens spread over 129 280; a third of the tokens has probability 0. N = 200: gross faults."""
    generator = torch.Generator().manual_seed(3)
    row = torch.rand(129_280, generator=generator) * (torch.rand(129_280, generator=generator) < 0.66)
    row /= row.sum()
    group = torch.arange(129_280) * 16 // 129_280
    tokens = torch.cat([keyed.race(row.expand(50, -1), fixed(i, 50), torch.arange(50)) for i in range(4)])
    assert (row[tokens] > 0).all()
    expected = torch.zeros(16, dtype=torch.float64).index_add_(0, group, row.double())
    assert chi_square(torch.bincount(group[tokens], minlength=16), expected * 200) > ALPHA
    assert len(tokens.unique()) > 190


def test_race_of_a_certain_token_is_certain() -> None:
    row = torch.zeros(50_000, 7)
    row[:, 4] = 1
    assert (keyed.race(row, fixed(1, 50_000), torch.arange(50_000)) == 4).all()


@pytest.mark.parametrize(("position", "token"), [(3_322_734, 1), (26_720_183, 2)])
def test_a_certain_token_wins_with_the_worst_number(position: int, token: int) -> None:
    """Key 0 gives it a number there that rounds to 1 in float32, whose logarithm would leave it nothing."""
    row = torch.zeros(1, 4)
    row[0, token] = 1
    assert keyed.race(row, torch.tensor([0]), torch.tensor([position])).item() == token


def test_draws_are_the_same_alone_in_any_batch_and_order() -> None:
    generator = torch.Generator().manual_seed(4)
    probs = torch.rand(300, 700, generator=generator)
    key = torch.randint(-(1 << 62), 1 << 62, (300,), generator=generator)
    position = torch.randint(100_000, (300,), generator=generator)
    tokens, numbers = keyed.race(probs, key, position), keyed.uniform(key, position, keyed.PICK)
    order = torch.randperm(300, generator=generator)
    assert torch.equal(keyed.race(probs[order], key[order], position[order]), tokens[order])
    assert torch.equal(keyed.uniform(key[order], position[order], keyed.PICK), numbers[order])
    for i in range(0, 300, 17):
        one = slice(i, i + 1)
        assert keyed.race(probs[one], key[one], position[one]).item() == tokens[i]
        assert keyed.uniform(key[one], position[one], keyed.PICK).item() == numbers[i]


def test_pairs_of_key_and_position_do_not_coincide() -> None:
    """Ten million pairs of small numbers: of 64 bits none coincide, of 32 bits ten thousand would."""
    key, position = torch.arange(10_000).repeat_interleave(1000), torch.arange(1000).repeat(10_000)
    first, second = keyed.words(key, position, keyed.RACE)
    assert len(torch.unique((first << 32) | second)) == len(key)


def test_known_numbers_stay() -> None:
    """A new release must not change what a seed yields without notice."""
    key, position = torch.tensor([0, 1, 1 << 40, -5]), torch.tensor([0, 7, 129, 1 << 33])
    words = torch.stack(keyed.words(key, position, keyed.RACE))
    assert words.tolist() == WORDS
    probs = torch.arange(1, 1001, dtype=torch.float32).expand(4, -1)
    assert keyed.race(probs, key, position).tolist() == TOKENS


WORDS = [[2424872087, 2081820272, 3658268294, 3390556782], [1242311825, 1239087068, 479696717, 3613255637]]
TOKENS = [899, 717, 355, 931]


@pytest.mark.parametrize("seed", range(5))
def test_races_of_p_and_q_agree_as_often_as_they_can_be_told_to(seed: int) -> None:
    """With one key both races end at v in exactly 1 / sum over w of max(p_w / p_v, q_w / q_v) of the cases, in all at
    least (1 - TV) / (1 + TV) of them; drawn apart they agree in sum of p q. N = 200 000."""
    generator, size = torch.Generator().manual_seed(seed), 200_000
    p, q = (
        torch.rand(2, 12, generator=generator, dtype=torch.float64)
        .pow(3 * seed / 4 + 0.5)
        .mul_(torch.rand(2, 12, generator=generator) < 0.8)
    )
    p, q = p / p.sum(), q / q.sum()
    key, position = fixed(seed, size), torch.arange(size)
    a = keyed.race(p.float().expand(size, -1), key, position)
    b = keyed.race(q.float().expand(size, -1), key, position)
    both = race_agreement(p, q)
    assert chi_square(torch.bincount(a[a == b], minlength=12), both * size) > ALPHA
    distance = (p - q).abs().sum() / 2
    noise = 4 * 0.5 / size**0.5
    agreed = (a == b).double().mean()
    assert agreed > (1 - distance) / (1 + distance) - noise
    apart = (p * q).sum()
    assert agreed > apart + 0.1
    c = keyed.race(q.float().expand(size, -1), key, position, keyed.DRAFT)
    assert abs((a == c).double().mean() - apart) < noise


# Requests with a seed.

VOCAB, LENGTH = 40, 20


def generate(table: torch.Tensor, key: torch.Tensor, drafter: torch.Generator | None, most: int) -> torch.Tensor:
    """[B, LENGTH] tokens of requests with a seed each, after token 0, with 0..most drafts of any kind a step.

    A third of the drafts is what the race will say, a third any token, a third placeholders.
    """
    size = len(key)
    out = torch.zeros(size, LENGTH + most + 2, dtype=torch.int64)  # out[:, 0] is the token before
    done = torch.zeros(size, dtype=torch.int64)
    while (done < LENGTH).any():
        counts = torch.zeros(size, dtype=torch.int64)
        if drafter is not None:
            counts = torch.randint(most + 1, (size,), generator=drafter)
        counts = torch.minimum(counts, (LENGTH - done).clamp(min=0))
        width = int(counts.max())
        state = out.gather(1, done[:, None])[:, 0]
        drafts, rows = [], [table[state]]
        for i in range(width):
            right = keyed.race(rows[-1], key, done + i)
            kind = torch.randint(3, (size,), generator=drafter)
            other = torch.where(kind == 1, torch.randint(VOCAB, (size,), generator=drafter), PLACEHOLDER)
            drafts.append(torch.where(kind == 0, right, other))
            rows.append(table[drafts[-1].clamp(min=0)])
        place = torch.arange(width + 1).expand(size, -1)
        tokens = torch.stack(drafts, 1)[place[:, :width] < counts[:, None]] if width else torch.empty(0)
        batch = DraftBatch(tokens.int(), counts.cumsum(0), width)
        real = place <= counts[:, None]
        chosen = keyed.race(torch.stack(rows, 1)[real], to_rows(batch, key), (done[:, None] + place)[real])
        verdict = verify_exact(batch, chosen)
        for i in range(width + 1):
            shown = (i <= verdict.accepted) & (done + 1 + i < out.shape[1])
            at = (done + 1 + i).clamp(max=out.shape[1] - 1)[:, None]
            new = torch.where(shown, verdict.tokens[:, i].long(), out.gather(1, at)[:, 0])
            out.scatter_(1, at, new[:, None])
        done = torch.where(done < LENGTH, done + verdict.accepted + 1, done)
    return out[:, 1 : LENGTH + 1]


@given(st.integers(0, 2**31), st.integers(1, 5))
@settings(max_examples=6, deadline=None, derandomize=True)
def test_tokens_of_a_seed_do_not_depend_on_drafts_or_company(seed: int, most: int) -> None:
    """Without drafts, with other drafts, in another order, alone: the same 20 tokens."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.rand(VOCAB, VOCAB, generator=generator).pow(6)
    table /= table.sum(1, keepdim=True)
    key = torch.randint(-(1 << 62), 1 << 62, (20,), generator=generator)
    plain = generate(table, key, None, 0)
    assert torch.equal(generate(table, key, generator, most), plain)
    order = torch.randperm(20, generator=generator)
    assert torch.equal(generate(table, key[order], generator, most), plain[order])
    assert torch.equal(generate(table, key[3:4], generator, most), plain[3:4])
    assert len(plain.unique(dim=0)) > 15
