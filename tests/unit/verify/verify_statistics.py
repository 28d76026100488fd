"""What the proofs about distributions share: small chains, many requests verified at once, exact laws, p-values.

A chain is a first-order Markov target and drafter. Everything about it can be computed: the joint distribution of its
tokens, and how many drafts a method accepts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mtp_runtime.verify import (
    PLACEHOLDER,
    DraftBatch,
    Noise,
    Verdict,
    keyed,
    to_rows,
    verify_block,
    verify_exact,
    verify_tokenwise,
)

ALPHA = 1e-4
"""Chance that a test of a correct rule fails; seeds are fixed, so that it either always does or never."""


@dataclass(frozen=True)
class Chain:
    """target, drafter: [V, V] float64, a row for each token before; guess: [V], what a one-hot drafter proposes."""

    target: Tensor
    drafter: Tensor
    guess: Tensor

    @property
    def vocab(self) -> int:
        return self.target.shape[0]

    def proposals(self, one_hot: bool) -> Tensor:
        """[V, V] how drafts are drawn: one-hot ones are the guess, every eighth time any token, forbidden ones too."""
        if not one_hot:
            return self.drafter
        return torch.eye(self.vocab, dtype=torch.float64)[self.guess] * 7 / 8 + 1 / 8 / self.vocab


def chain(target: list[list[float]], drafter: list[list[float]], guess: list[int]) -> Chain:
    """Short form."""
    return Chain(
        torch.tensor(target, dtype=torch.float64), torch.tensor(drafter, dtype=torch.float64), torch.tensor(guess)
    )


THREE = chain(
    [[0.2, 0.5, 0.3], [0.6, 0.0, 0.4], [0.1, 0.1, 0.8]],
    [[0.5, 0.3, 0.2], [0.3, 0.3, 0.4], [0.4, 0.0, 0.6]],
    [1, 2, 0],
)
"""After token 1 the drafter proposes what the target forbids; after token 2 it misses what the target allows."""

TWO = chain([[0.1, 0.9], [0.8, 0.2]], [[0.25, 0.75], [0.65, 0.35]], [1, 0])
"""For long blocks: most drafts are accepted, and the likely path alternates between the two tokens."""


@dataclass
class Step:
    """One step of many requests, with all that any method reads.

    target: [R, V] p; position: [R], the place of each row; key: [B], the seed of each request.
    """

    batch: DraftBatch
    target: Tensor
    draft_probs: Tensor | None
    noise: Noise
    key: Tensor
    position: Tensor


Method = Callable[[Step], Verdict]


def tokenwise(step: Step) -> Verdict:
    return verify_tokenwise(step.batch, step.target, step.draft_probs, step.noise)


def block(step: Step) -> Verdict:
    return verify_block(step.batch, step.target, step.draft_probs, step.noise)


def by_key(step: Step) -> Verdict:
    return verify_exact(step.batch, keyed.race(step.target, to_rows(step.batch, step.key), step.position))


METHODS: dict[str, Method] = {"tokenwise": tokenwise, "block": block, "keyed": by_key}


@dataclass
class Played:
    """tokens: [N, depth + 1], each request's output continued from the target; accepted: [N]; drafts: [N, depth]."""

    tokens: Tensor
    accepted: Tensor
    drafts: Tensor


def sample(table: Tensor, row: Tensor, generator: torch.Generator) -> Tensor:
    """One token for each entry of row [N], from that row of the table [V, V]."""
    point = torch.rand(row.shape[0], 1, dtype=torch.float64, generator=generator)
    return (point >= table.cumsum(1)[:, :-1].index_select(0, row)).sum(1)


def play(
    method: Method,
    law: Chain,
    depth: int,
    one_hot: bool,
    size: int,
    seed: int,
    *,
    raced: bool = False,
    ragged: bool = False,
    holes: float = 0.0,
) -> Played:
    """Verify one step of `size` requests, all after token 0, and continue each to depth + 1 tokens.

    raced: drafts are drawn with the numbers the target will use; ragged: 0..depth drafts a request instead of depth;
    holes: share of drafts that are placeholders, with a q that is no number.
    """
    generator = torch.Generator().manual_seed(seed)
    key = torch.arange(size) + (seed << 32)
    proposals = law.proposals(one_hot)
    drafts, states = [], [torch.zeros(size, dtype=torch.int64)]
    for place in range(depth):
        if raced:
            rows = proposals.float().index_select(0, states[-1])
            draft = keyed.race(rows, key, torch.full_like(key, place))
        else:
            draft = sample(proposals, states[-1], generator)
        if holes:
            draft = draft.masked_fill(torch.rand(size, generator=generator) < holes, PLACEHOLDER)
        drafts.append(draft)
        states.append(draft.clamp(min=0))
    matrix, state = torch.stack(drafts, 1), torch.stack(states, 1)
    counts, position = torch.full((size,), depth), torch.arange(depth + 1).expand(size, -1)
    real, row = torch.ones_like(matrix, dtype=torch.bool), state.flatten()
    tokens, before, place_of_row = matrix.flatten(), state[:, :-1].flatten(), position.flatten()
    if ragged:
        counts = torch.randint(depth + 1, (size,), generator=generator)
        real, rows = position[:, :depth] < counts[:, None], position <= counts[:, None]
        tokens, before, row, place_of_row = matrix[real], state[:, :-1][real], state[rows], position[rows]
    q = None if one_hot else law.drafter.float().index_select(0, before)
    if q is not None and holes:
        q = q.masked_fill(tokens[:, None] < 0, torch.nan)
    batch = DraftBatch(tokens.int(), counts.cumsum(0), depth)
    target = law.target.float().index_select(0, row)
    verdict = method(Step(batch, target, q, Noise.drawn(batch, generator), key, place_of_row))
    columns = [verdict.tokens[:, 0].long()]
    for column in verdict.tokens.long().unbind(1)[1:]:
        columns.append(torch.where(column < 0, sample(law.target, columns[-1], generator), column))
    return Played(torch.stack(columns, 1), verdict.accepted, matrix.masked_fill(~real, PLACEHOLDER))


def with_noise(method: Method, change: Callable[[Step], Noise]) -> Method:
    """The method, fed other random numbers."""
    return lambda step: method(replace(step, noise=change(step)))


def chi_square(observed: Tensor, expected: Tensor) -> float:
    """p-value of counts against expected counts, cells below 5 taken together; 0 where the impossible happened."""
    if observed[expected <= 0].sum() > 0:
        return 0.0
    small = expected < 5
    observed = torch.cat((observed[~small], observed[small].sum()[None])).double()
    expected = torch.cat((expected[~small], expected[small].sum()[None])).double()
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(expected) < 2:
        return 1.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2, dtype=torch.float64), statistic / 2).item()


def p_of_tokens(law: Chain, tokens: Tensor) -> float:
    """Chi-square test of whole sequences [N, L] against the target's joint distribution after token 0."""
    vocab, length = law.vocab, tokens.shape[1]
    expected, index = law.target[0], tokens[:, 0]
    for i in range(1, length):
        expected = (expected.reshape(-1, vocab)[:, :, None] * law.target).flatten()
        index = index * vocab + tokens[:, i]
    return chi_square(torch.bincount(index, minlength=vocab**length), expected * len(tokens))


def p_of_pairs(law: Chain, tokens: Tensor) -> float:
    """The smallest p-value over pairs of neighbouring places, and so over the marginals, times their number."""
    marginal, worst = law.target[0], 1.0
    for i in range(1, tokens.shape[1]):
        expected = marginal[:, None] * law.target
        observed = torch.bincount(tokens[:, i - 1] * law.vocab + tokens[:, i], minlength=law.vocab**2)
        worst = min(worst, chi_square(observed, expected.flatten() * len(tokens)))
        marginal = expected.sum(0)
    return min(worst * (tokens.shape[1] - 1), 1.0)


def p_of_lengths(reach: Tensor, accepted: Tensor) -> float:
    """Chi-square test of the accepted lengths [N] against reach [depth], P(at least i drafts accepted), i = 1.."""
    ends = torch.cat((reach.new_ones(1), reach, reach.new_zeros(1)))
    expected = (ends[:-1] - ends[1:]).clamp(min=0)
    return chi_square(torch.bincount(accepted, minlength=len(expected)), expected * len(accepted))


def exact_reach(name: str, law: Chain, depth: int, one_hot: bool) -> Tensor:
    """[depth] P(at least i drafts are accepted), i = 1..depth, of a method after token 0.

    A walk over the last accepted draft for all but block with real q, where the weight of a prefix depends on all of
    it: there P = E[w_i] (arXiv 2403.10444), over all vocab^depth drafts.
    """
    p, q = law.target, law.proposals(one_hot)
    if name == "block" and not one_hot:
        return block_reach([p[[0]]] + [p.repeat(law.vocab**i, 1) for i in range(depth - 1)], q, depth)
    if one_hot:
        both = q * p
    elif name == "tokenwise":
        both = torch.minimum(p, q)
    else:
        both = race_agreement(p, q)
    state, reach = torch.eye(law.vocab, dtype=torch.float64)[0], []
    for _ in range(depth):
        state = state @ both
        reach.append(state.sum())
    return torch.stack(reach)


def block_reach(p: list[Tensor], q: Tensor, depth: int) -> Tensor:
    """E[w_i] over the tree of drafts; p: the target's rows of each level, q: the drafter's chain."""
    vocab = q.shape[0]
    chance, weight, reach = torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64), []
    for i in range(depth):
        own = q[[0]] if i == 0 else q.repeat(vocab ** (i - 1), 1)
        ratio = torch.where(own > 0, p[i] / own, 0.0)
        weight = (weight[:, None] * ratio).clamp(max=1).flatten()
        chance = (chance[:, None] * own).flatten()
        reach.append((chance * weight).sum())
    return torch.stack(reach)


def race_agreement(p: Tensor, q: Tensor) -> Tensor:
    """[..., V] the chance that races of p and q with the same numbers both end at v.

    v wins both where E_w / E_v >= max(p_w / p_v, q_w / q_v) for all w, E exponential.
    """
    ratio = torch.maximum(p[..., None, :] / p[..., :, None], q[..., None, :] / q[..., :, None])
    return torch.where((p > 0) & (q > 0), 1 / ratio.nan_to_num(posinf=torch.inf).sum(-1), 0.0)
