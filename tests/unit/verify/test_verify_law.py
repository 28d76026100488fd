"""What a method does, exactly: its law is read out of the code by bisection, without sampling.

For a given block of drafts acceptance is a threshold in each uniform number, and the last token is a step function of
its own. Bisection finds both to 2^-26, over every block of drafts of a small random tree (any target and drafter, not
only Markov ones, with zeros). From them follow

- the joint distribution of the emitted tokens, which must be the target's to 1e-5, one-hot for each block of drafts;
- the expected number of accepted drafts, integrated over all uniform numbers: block is at least tokenwise, equal with
  one-hot drafts, and both are what the papers derive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch", reason="verification tests run in the engine environment")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor  # noqa: E402
from verify_statistics import THREE, block_reach, exact_reach  # noqa: E402

from mtp_runtime.verify import DraftBatch, Noise, Verdict, recover, verify_block, verify_tokenwise  # noqa: E402
from mtp_runtime.verify.batch import emit, prefix  # noqa: E402
from mtp_runtime.verify.tokenwise import draft_chances, passes  # noqa: E402

pytestmark = pytest.mark.engine

ROUNDS, EXACT = 26, 1e-5
NEVER = torch.inf
"""As U: accepts nothing."""


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
    """Two tokens a tile: a vocabulary of three then needs both levels of the search."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recover, "TILE", 2)
        yield


@dataclass
class Tree:
    """p[i], q[i]: [V^i, V] float64, the distribution of token i after each prefix; p has one level more."""

    p: list[Tensor]
    q: list[Tensor]

    @property
    def vocab(self) -> int:
        return self.p[0].shape[1]

    @property
    def depth(self) -> int:
        return len(self.q)

    def blocks(self) -> Tensor:
        """[V^K, K] every block of drafts."""
        return torch.cartesian_prod(*[torch.arange(self.vocab)] * self.depth).reshape(-1, self.depth)

    def prefix_of(self, level: int) -> Tensor:
        """[V^K] the prefix of each block at a level, an index into p[level]."""
        return torch.arange(self.vocab**self.depth) // self.vocab ** (self.depth - level)

    def chance(self) -> Tensor:
        """[V^K] the probability that the drafter proposes each block."""
        chance = torch.ones(1, dtype=torch.float64)
        for q in self.q:
            chance = (chance[:, None] * q).flatten()
        return chance


def random_tree(vocab: int, depth: int, seed: int) -> Tree:
    """Small integer weights: zeros, equal probabilities and certain tokens are common."""
    generator = torch.Generator().manual_seed(seed)

    def level(rows: int) -> Tensor:
        weights = (torch.rand(rows, vocab, generator=generator, dtype=torch.float64) * 7 - 2).clamp(min=0).ceil()
        weights.scatter_add_(1, torch.randint(vocab, (rows, 1), generator=generator), torch.ones_like(weights))
        return weights / weights.sum(1, keepdim=True)

    return Tree([level(vocab**i) for i in range(depth + 1)], [level(vocab**i) for i in range(depth)])


trees = st.builds(random_tree, st.integers(2, 3), st.integers(1, 3), st.integers(0, 2**31))

Verify = Callable[[DraftBatch, Tensor, Tensor | None, Noise], Verdict]


@dataclass
class Law:
    """Of a method on every block. stop: [M, K + 1] P(i drafts accepted); last: [M, K + 1, V] the token that follows."""

    stop: Tensor
    last: Tensor

    def accepted(self) -> Tensor:
        """[M] expected number of accepted drafts."""
        return (self.stop * torch.arange(self.stop.shape[1])).sum(1)


class Probe:
    """A method on every block of a tree, at any uniform numbers."""

    def __init__(self, verify: Verify, tree: Tree, one_hot: bool, hole: int | None = None) -> None:
        self.verify, self.tree, self.one_hot = verify, tree, one_hot
        self.drafts = tree.blocks()
        if hole is not None:
            self.drafts[:, hole] = -1
        self.p = torch.stack([p[tree.prefix_of(i)] for i, p in enumerate(tree.p)], 1).float()
        self.q = torch.stack([q[tree.prefix_of(i)] for i, q in enumerate(tree.q)], 1).float()

    def run(self, accept: Tensor, pick: Tensor) -> Verdict:
        """accept: [M, C, K], pick: [M, C], C cases of every block; verdict of M x C requests."""
        count, depth = accept.shape[1], self.tree.depth

        def repeated(values: Tensor) -> Tensor:
            return values[:, None].expand(-1, count, *values.shape[1:]).flatten(0, 2)

        tokens = repeated(self.drafts[..., None])[:, 0].int()
        batch = DraftBatch.of(tokens, [depth] * (len(self.drafts) * count))
        q = None if self.one_hot else repeated(self.q)
        return self.verify(batch, repeated(self.p).clone(), q, Noise(accept.flatten(), pick.flatten()))

    def bisect(self, shape: tuple[int, ...], below: Callable[[Tensor], Tensor]) -> Tensor:
        """The point in [0, 1] up to which `below` holds."""
        low, high = torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.float64)
        for _ in range(ROUNDS):
            middle = (low + high) / 2
            hit = below(middle)
            low, high = torch.where(hit, middle, low), torch.where(hit, high, middle)
        return (low + high) / 2

    def thresholds(self) -> Tensor:
        """[M, K]: below which U_i the first i drafts are accepted, when the earlier U are 0 and the later accept
        nothing."""
        count, depth = self.drafts.shape
        before, own = torch.ones(depth, depth).tril(-1).bool(), torch.eye(depth).bool()
        others = torch.where(before, 0.0, NEVER).double().expand(count, -1, -1)

        def below(middle: Tensor) -> Tensor:
            accept = torch.where(own, middle[:, :, None], others)
            accepted = self.run(accept, torch.zeros(count, depth, dtype=torch.float64)).accepted
            return accepted.view(count, depth) > torch.arange(depth)

        return self.bisect((count, depth), below)

    def last(self) -> Tensor:
        """[M, K + 1, V] the distribution of the token after i accepted drafts; meaningless where i cannot be."""
        (count, depth), vocab = self.drafts.shape, self.tree.vocab
        kept = torch.ones(depth + 1, depth).tril(-1).bool()
        accept = torch.where(kept, 0.0, NEVER).double().repeat_interleave(vocab - 1, 0).expand(count, -1, -1)
        wanted = torch.arange(vocab - 1).repeat(depth + 1)

        def below(middle: Tensor) -> Tensor:
            verdict = self.run(accept, middle)
            token = verdict.tokens.gather(1, verdict.accepted[:, None]).view(count, -1)
            return token <= wanted

        edges = self.bisect((count, (depth + 1) * (vocab - 1)), below).view(count, depth + 1, vocab - 1)
        ends = torch.cat((torch.zeros_like(edges[..., :1]), edges, torch.ones_like(edges[..., :1])), 2)
        return ends.diff(dim=2)


def law_of(name: str, verify: Verify, tree: Tree, one_hot: bool, hole: int | None = None) -> Law:
    """Tokenwise accepts i drafts when the first i numbers lie below their thresholds; block when the i-th is the last
    that does."""
    probe = Probe(verify, tree, one_hot, hole)
    threshold = probe.thresholds()
    reach = threshold.cumprod(1) if name == "tokenwise" else 1 - (1 - threshold).flip(1).cumprod(1).flip(1)
    one, zero = torch.ones_like(reach[:, :1]), torch.zeros_like(reach[:, :1])
    return Law(-torch.cat((one, reach, zero), 1).diff(dim=1), probe.last())


def joint(tree: Tree, law: Law, chance: Tensor) -> Tensor:
    """[V^(K + 1)] of the emitted tokens, continued from the target, when blocks come with `chance` [M]."""
    out = torch.ones(1, dtype=torch.float64)
    for i, p in enumerate(tree.p):
        ended = (chance * law.stop[:, i])[:, None] * law.last[:, i]
        here = torch.zeros_like(p).index_add_(0, tree.prefix_of(i), ended)
        out = ((out[:, None] * p if i else 0) + here).flatten()
    return out


def wanted(tree: Tree) -> Tensor:
    """[V^(K + 1)] of the target alone."""
    out = torch.ones(1, dtype=torch.float64)
    for p in tree.p:
        out = (out[:, None] * p).flatten()
    return out


def distance(tree: Tree, law: Law, one_hot: bool) -> float:
    """Total variation of the emitted tokens from the target; the worst block of drafts where they are one-hot."""
    ways = torch.eye(len(law.stop), dtype=torch.float64) if one_hot else tree.chance()[None]
    return max(float((joint(tree, law, chance) - wanted(tree)).abs().sum()) / 2 for chance in ways)


METHODS = {"tokenwise": verify_tokenwise, "block": verify_block}
MODES = pytest.mark.parametrize("one_hot", [True, False], ids=["one-hot", "probabilities"])


@pytest.mark.parametrize("name", METHODS)
@MODES
@given(tree=trees)
@settings(max_examples=9, deadline=None, derandomize=True)
def test_emitted_tokens_have_the_targets_distribution_exactly(name: str, one_hot: bool, tree: Tree) -> None:
    """The joint law, block verification included (va#7807, va#7603)."""
    assert distance(tree, law_of(name, METHODS[name], tree, one_hot), one_hot) < EXACT


@pytest.mark.parametrize("name", METHODS)
@MODES
@given(tree=trees, data=st.data())
@settings(max_examples=5, deadline=None, derandomize=True)
def test_a_placeholder_does_not_change_the_distribution(
    name: str, one_hot: bool, tree: Tree, data: st.DataObject
) -> None:
    """It is never accepted, and the token in its place follows the unmodified p."""
    hole = data.draw(st.integers(0, tree.depth - 1))
    law = law_of(name, METHODS[name], tree, one_hot, hole)
    assert law.stop[:, hole + 1 :].abs().max() < EXACT
    assert distance(tree, law, one_hot) < EXACT
    reached = law.stop[:, hole] > EXACT
    assert torch.allclose(law.last[reached, hole], tree.p[hole][tree.prefix_of(hole)][reached], atol=EXACT)


@given(tree=trees)
@settings(max_examples=10, deadline=None, derandomize=True)
def test_block_accepts_at_least_as_many_drafts(tree: Tree) -> None:
    """With real q on average over the drafts; both counts are the papers': E[product of min(1, r)], E[w]."""
    chance = tree.chance()
    slow, fast = (chance @ law_of(name, verify, tree, False).accepted() for name, verify in METHODS.items())
    assert fast >= slow - EXACT
    ratio = torch.stack(
        [
            (p / q).nan_to_num(0.0, posinf=0.0).flatten()[tree.prefix_of(i + 1)]
            for i, (p, q) in enumerate(zip(tree.p, tree.q, strict=False))
        ],
        1,
    )
    assert abs(slow - chance @ ratio.clamp(max=1).cumprod(1).sum(1)) < EXACT
    weight = torch.ones_like(chance)
    weights = torch.zeros_like(chance)
    for i in range(tree.depth):
        weight = (weight * ratio[:, i]).clamp(max=1)
        weights += weight
    assert abs(fast - chance @ weights) < EXACT


@given(tree=trees)
@settings(max_examples=9, deadline=None, derandomize=True)
def test_block_accepts_as_many_one_hot_drafts(tree: Tree) -> None:
    """Whatever the drafts are."""
    slow, fast = (law_of(name, verify, tree, True).accepted() for name, verify in METHODS.items())
    assert torch.allclose(slow, fast, atol=EXACT)


def test_block_gains_where_it_can() -> None:
    """The chain of the distribution tests, K = 2 and 3: 5 and 10 % more drafts."""
    for depth, (slow, fast) in {2: (1.19, 1.25), 3: (1.533, 1.68)}.items():
        rows = [THREE.target[[0]] if i == 0 else THREE.target.repeat(3 ** (i - 1), 1) for i in range(depth + 1)]
        drafter = [THREE.drafter[[0]] if i == 0 else THREE.drafter.repeat(3 ** (i - 1), 1) for i in range(depth)]
        tree = Tree(rows, drafter)
        for name, wanted_mean in (("tokenwise", slow), ("block", fast)):
            mean = tree.chance() @ law_of(name, METHODS[name], tree, False).accepted()
            assert mean == pytest.approx(wanted_mean, abs=EXACT)
            assert exact_reach(name, THREE, depth, False).sum() == pytest.approx(wanted_mean, abs=EXACT)
        assert block_reach(rows, THREE.drafter, depth).sum() == pytest.approx(fast, abs=EXACT)


@MODES
def test_a_wrong_recovery_is_found(one_hot: bool) -> None:
    def from_the_target(batch: DraftBatch, probs: Tensor, draft_probs: Tensor | None, noise: Noise) -> Verdict:
        accepted = prefix(batch, passes(*draft_chances(batch, probs, draft_probs), noise.accept))
        return emit(batch, accepted, recover.draw(probs[batch.first_row + accepted], noise.pick))

    for seed in range(5):
        tree = random_tree(3, 2, seed)
        assert distance(tree, law_of("tokenwise", from_the_target, tree, one_hot), one_hot) > 0.01
