"""Lossless is a claim about a distribution, so it is tested as one.

N requests are verified at once, all after the same token; each output is continued from the target to K + 1 tokens,
whose distribution must be the target's. The tests are chi-square at ALPHA = 1e-4 with fixed seeds. What they find with
a probability of 0.99, as a total variation of the emitted tokens from the target, whatever its form:

| K       | N       | statistic over                                   | finds           |
|---------|---------|--------------------------------------------------|-----------------|
| 1, 2, 3 | 300 000 | all 3^(K + 1) sequences, some of them impossible | 0.7, 0.8, 1 %   |
| 5       | 300 000 | all 2^6 sequences                                | 1 %             |
| 15      | 160 000 | the 15 pairs of neighbouring tokens, each        | 1 %             |

Accepted lengths are compared, at every K, with their exact distribution: that finds what a lossless but lazy rule
would lose, and what is too small to see in the tokens.

At the end the tests of the tests: rules with a planted fault, each of which the same statistics must find. The smallest
is an acceptance threshold that is wrong by 0.01.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="verification tests run in the engine environment")

from verify_statistics import (  # noqa: E402
    ALPHA,
    METHODS,
    THREE,
    TWO,
    Played,
    Step,
    block,
    chi_square,
    exact_reach,
    p_of_lengths,
    p_of_pairs,
    p_of_tokens,
    play,
    tokenwise,
    with_noise,
)

from mtp_runtime.verify import (  # noqa: E402
    DraftBatch,
    Noise,
    Verdict,
    keyed,
    recover,
    to_rows,
    verify_exact,
    verify_greedy,
    verify_mixed,
    verify_tokenwise,
)
from mtp_runtime.verify.batch import emit, prefix  # noqa: E402
from mtp_runtime.verify.tokenwise import draft_chances, passes  # noqa: E402

pytestmark = pytest.mark.engine

MANY = 300_000
SIZES = {5: 300_000, 15: 160_000}
MODES = pytest.mark.parametrize("one_hot", [True, False], ids=["one-hot", "probabilities"])


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens a tile: three tokens then need both levels of the search, and no time goes into empty tiles."""
    monkeypatch.setattr(recover, "TILE", 2)


@pytest.mark.parametrize("depth", [1, 2, 3])
@MODES
@pytest.mark.parametrize("name", METHODS)
def test_joint_distribution_is_the_targets(name: str, one_hot: bool, depth: int) -> None:
    """Keyed drafts are raced with the target's own numbers: the case in which they could do harm."""
    played = play(
        METHODS[name], THREE, depth, one_hot, MANY, seed=10 * depth + one_hot, raced=name == "keyed" and not one_hot
    )
    assert p_of_tokens(THREE, played.tokens) > ALPHA
    assert p_of_lengths(exact_reach(name, THREE, depth, one_hot), played.accepted) > ALPHA


@pytest.mark.parametrize("depth", SIZES)
@MODES
@pytest.mark.parametrize("name", METHODS)
def test_long_blocks(name: str, one_hot: bool, depth: int) -> None:
    raced = name == "keyed" and not one_hot
    played = play(METHODS[name], TWO, depth, one_hot, SIZES[depth], seed=depth + one_hot, raced=raced)
    assert p_of_long(played) > ALPHA
    assert p_of_lengths(exact_reach(name, TWO, depth, one_hot), played.accepted) > ALPHA


def p_of_long(played: Played) -> float:
    """Joint where the sequences can be counted, else pairwise."""
    return (p_of_tokens if played.tokens.shape[1] <= 6 else p_of_pairs)(TWO, played.tokens)


@MODES
@pytest.mark.parametrize("name", METHODS)
def test_ragged_batches_with_placeholders(name: str, one_hot: bool) -> None:
    """0..3 drafts a request, every second draft a placeholder, with a q that is no number.

    All outputs together must be the target's; in the place of a placeholder stands an ordinary token of p (as the first
    token: N about 110 000, finds 1 %).
    """
    played = play(METHODS[name], THREE, 3, one_hot, MANY, seed=40 + one_hot, ragged=True, holes=0.5)
    assert p_of_tokens(THREE, played.tokens) > ALPHA
    hole = torch.where(played.drafts < 0, torch.arange(3), 3).amin(1)  # padding of the short ones counts as one
    assert (played.accepted <= hole).all()
    first = played.tokens[hole == 0]
    assert p_of_tokens(THREE, first[:, :1]) > ALPHA
    assert p_of_tokens(THREE, first) > ALPHA
    second = played.tokens[(hole == 1) & (played.accepted == 1)]  # the draft before it was kept
    assert len(second) > 8_000
    for token in range(3):
        after = second[second[:, 0] == token, 1]
        assert chi_square(torch.bincount(after, minlength=3), THREE.target[token] * len(after)) > ALPHA


@pytest.mark.parametrize("depth", [1, 3, 5, 15])
def test_greedy_emits_the_argmax_path_whatever_the_drafts(depth: int) -> None:
    """2000 requests over 50 tokens, half the drafts right: the output is the path, as far as the drafts followed it."""
    generator = torch.Generator().manual_seed(depth)
    best = torch.randperm(50, generator=generator)
    logits = torch.randn(50, 50, generator=generator).scatter_(1, best[:, None], 9.0)
    state, drafts, rows = torch.randint(50, (2000,), generator=generator), [], []
    begin = state
    for _ in range(depth):
        rows.append(logits[state])
        other = torch.randint(-1, 50, (2000,), generator=generator)
        drafts.append(torch.where(torch.rand(2000, generator=generator) < 0.8, best[state], other))
        state = drafts[-1].clamp(min=0)
    rows.append(logits[state])
    batch = DraftBatch(torch.stack(drafts, 1).flatten(), torch.arange(1, 2001) * depth, depth)
    verdict = verify_greedy(batch, torch.stack(rows, 1).flatten(0, 1))
    path = [best[begin]]
    for _ in range(depth):
        path.append(best[path[-1]])
    wanted = torch.stack(path, 1)
    right = (torch.stack(drafts, 1) == wanted[:, :-1]).long().cumprod(1).sum(1)
    assert torch.equal(verdict.accepted, right)
    shown = torch.arange(depth + 1) <= right[:, None]
    assert torch.equal(verdict.tokens.long(), wanted.masked_fill(~shown, -1))


@MODES
def test_each_request_of_a_mixed_batch_keeps_its_law(one_hot: bool) -> None:
    """Ragged; a third greedy, a third seeded, a third neither (N = 100 000 each, finds 1.4 %)."""
    kind = torch.arange(MANY) % 3

    def mixed(step: Step) -> Verdict:
        raced = keyed.race(step.target, to_rows(step.batch, step.key), step.position)
        chosen = torch.where(to_rows(step.batch, kind) == 0, step.target.argmax(1), raced)
        return verify_mixed(step.batch, chosen, kind < 2, step.target, step.draft_probs, step.noise, verify_tokenwise)

    played = play(mixed, THREE, 2, one_hot, MANY, seed=60 + one_hot, ragged=True)
    assert (played.tokens[kind == 0, 0] == 1).all()
    kept = (kind == 0) & (played.accepted > 0)
    assert (played.tokens[kept, 1] == 0).all()
    assert p_of_tokens(THREE, played.tokens[kind == 1]) > ALPHA
    assert p_of_tokens(THREE, played.tokens[kind == 2]) > ALPHA


# Tests of the tests: rules with a fault.


def product_rule(step: Step) -> Verdict:
    """Accept the longest prefix whose product of p / q reaches the product of U, as some engines do."""
    batch = step.batch
    p, q = draft_chances(batch, step.target, step.draft_probs)
    ratio = batch.rectangle((p / q).clamp(max=1), 0.0).double()
    hits = ratio.cumprod(1) >= batch.rectangle(step.noise.accept, 1.0).cumprod(1)
    last = (hits * torch.arange(1, batch.width + 1)).amax(1, keepdim=True)
    passed = torch.arange(batch.width) < last
    return tokenwise(force(step, torch.where(passed, 0.0, torch.inf)))


def force(step: Step, accept: torch.Tensor) -> Step:
    """The step with other numbers for acceptance [B, width]."""
    return Step(
        step.batch,
        step.target,
        step.draft_probs,
        Noise(step.batch.flat(accept), step.noise.pick),
        step.key,
        step.position,
    )


def recovery_from_the_target(step: Step) -> Verdict:
    """The draft that was just rejected may come back."""
    accepted = prefix(step.batch, passes(*draft_chances(step.batch, step.target, step.draft_probs), step.noise.accept))
    return emit(step.batch, accepted, recover.draw(step.target[step.batch.first_row + accepted], step.noise.pick))


def eight_bits(step: Step) -> Noise:
    """Uniform numbers as a bfloat16 generator yields them: one in 256 is 0."""
    return Noise((step.noise.accept * 256).floor() / 256, step.noise.pick)


def accepts_the_impossible(step: Step) -> Verdict:
    """p / q >= U without p > 0."""
    noise = eight_bits(step)
    p, q = draft_chances(step.batch, step.target, step.draft_probs)
    accepted = prefix(step.batch, p >= noise.accept * q)
    wanted = torch.where(torch.arange(step.batch.width) < accepted[:, None], 0.0, torch.inf)
    verdict = tokenwise(force(step, wanted))
    drafts = step.batch.rectangle(step.batch.tokens, -1)
    lost = torch.arange(step.batch.width) < accepted[:, None]
    verdict.tokens[:, :-1] = torch.where(lost, drafts, verdict.tokens[:, :-1])
    return verdict


def shared_between_positions(step: Step) -> Noise:
    accept = step.batch.rectangle(step.noise.accept, 0.0).clone()
    accept[:, 1] = accept[:, 0]
    return Noise(step.batch.flat(accept), step.noise.pick)


def shared_with_the_draw(step: Step) -> Noise:
    return Noise(step.noise.accept, step.batch.rectangle(step.noise.accept, 0.0)[:, 0].clone())


def one_percent(step: Step) -> Noise:
    return Noise(step.noise.accept - 0.01, step.noise.pick)


def one_percent_unseen(step: Step) -> Verdict:
    """Keyed: one draft in a hundred is taken for the target's token."""
    chosen = keyed.race(step.target, to_rows(step.batch, step.key), step.position)
    rows = step.batch.draft_rows
    unseen = step.noise.accept < 0.01
    chosen[rows] = torch.where(unseen, step.batch.tokens.long(), chosen[rows])
    return verify_exact(step.batch, chosen)


FAULTS = {
    "product-rule": product_rule,
    "recovery-from-the-target": recovery_from_the_target,
    "accepts-the-impossible": accepts_the_impossible,
    "one-number-for-two-positions": with_noise(tokenwise, shared_between_positions),
    "one-number-for-accepting-and-drawing": with_noise(tokenwise, shared_with_the_draw),
    "one-percent": with_noise(tokenwise, one_percent),
    "one-percent-block": with_noise(block, one_percent),
    "one-percent-keyed": one_percent_unseen,
}


@MODES
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, one_hot: bool) -> None:
    """Gross ones already with a sixth of the requests."""
    size = MANY if "percent" in fault else MANY // 6
    assert p_of_tokens(THREE, play(FAULTS[fault], THREE, 2, one_hot, size, seed=70).tokens) < ALPHA


@pytest.mark.parametrize(("depth", "one_hot"), [(5, True), (15, False)], ids=["5-one-hot", "15-probabilities"])
@pytest.mark.parametrize("name", ["tokenwise", "block"])
def test_one_percent_is_found_in_long_blocks(name: str, one_hot: bool, depth: int) -> None:
    """With this chain and real q it moves a token's distribution by 0.3 % only, which the lengths show."""
    played = play(with_noise(METHODS[name], one_percent), TWO, depth, one_hot, SIZES[depth], seed=80)
    assert min(p_of_long(played), p_of_lengths(exact_reach(name, TWO, depth, one_hot), played.accepted)) < ALPHA
