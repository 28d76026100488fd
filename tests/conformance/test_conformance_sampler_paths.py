"""Paths of the patched sampler beside the plain one: no drafts, mixed batches, candidates, refusals, the switch."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import cpu_runner
import pytest
import sampler_edge as edge
import sampler_worker
import torch
import vllm_ascend.sample.rejection_sampler as verifier
from sampler_edge import make_sampler, patched, sampling, step
from sampler_law import AT_ONCE
from torch import Tensor
from verify_statistics import ALPHA, THREE, Step, exact_reach, p_of_lengths, p_of_tokens, play
from vllm.config import set_current_vllm_config

from mtp_runtime.adapters.settings import settings
from mtp_runtime.adapters.vllm_ascend import install, patches, registry
from mtp_runtime.adapters.vllm_ascend.patches import PatchRefused, digest
from mtp_runtime.adapters.vllm_ascend.sampler import PATCH, method_for
from mtp_runtime.verify import Verdict
from mtp_runtime.verify.seeded import worker_generator

B, K, V = 12, 3, 60
OTHER_RELEASE = Path(__file__).parents[2] / ".local/conformance/vllm-ascend-0.23.0.post1"


@pytest.fixture(autouse=True)
def plain_config() -> None:
    edge.configure()


def logits_of(rows: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_request_has_drafts(temperature: float) -> None:
    """The bonus tokens alone, from the package's sampler."""
    metadata, parameters = step(torch.zeros(0), [0] * B), sampling(torch.full((B,), temperature))
    with patched():
        torch.manual_seed(3)
        found = make_sampler()(metadata, None, logits_of(B), parameters).sampled_token_ids
        torch.manual_seed(3)
        wanted = make_sampler().sampler(logits_of(B), parameters).sampled_token_ids
    assert found.shape == (B, 1) and found.dtype == torch.int32
    assert torch.equal(found, wanted)


def test_the_function_without_drafts_in_a_wider_output() -> None:
    """As with padding to a fixed width: columns behind the bonus token are -1."""
    metadata = step(torch.zeros(0), [0] * B)
    bonus = torch.arange(B)[:, None].int()
    for temperature in (0.0, 0.8):
        with patched():
            found = verifier.rejection_sample(
                metadata.draft_token_ids,
                [0] * B,
                K,
                metadata.cu_num_draft_tokens,
                None,
                logits_of(0),
                bonus,
                sampling(torch.full((B,), temperature)),
            )
        assert torch.equal(found, torch.nn.functional.pad(bonus, (0, K), value=-1))


@pytest.mark.parametrize("seeded", [False, True])
def test_greedy_requests_of_a_mixed_batch_are_token_identical(seeded: bool) -> None:
    counts = [3, 0, 2, 3, 1, 3] * 2
    temperature = torch.tensor([0.0, 0.9] * 6).roll(1)
    greedy = temperature == 0
    for seed in range(8):
        logits = logits_of(sum(counts) + B, seed)
        metadata = step(torch.zeros(sum(counts)), counts)
        drafts = logits.argmax(-1)[metadata.target_logits_indices]
        drafts[seed % 5 :: 5] = -1
        found = []
        for context in (nullcontext(), patched()):
            generators = {i: torch.Generator().manual_seed(i) for i in range(4)} if seeded else {}
            with context:
                parameters = sampling(temperature, generators=generators)
                sampler = make_sampler()
                found.append(sampler(step(drafts, counts), None, logits.clone(), parameters).sampled_token_ids)
        assert torch.equal(found[0][greedy], found[1][greedy])


def test_drawn_requests_of_a_mixed_batch_keep_their_law() -> None:
    """Every second request greedy; the others' tokens follow the target (N = 100 000: finds 1.3 %)."""
    many, kind = 200_000, torch.arange(200_000) % 2

    def method(one: Step) -> Verdict:
        parts, rows = [], one.target.log().unflatten(0, (many, 3))
        for begin in range(0, many, AT_ONCE):
            own = slice(begin, begin + AT_ONCE)
            size = len(kind[own])
            parameters = sampling(kind[own].float())
            drafted = step(one.batch.tokens[2 * begin : 2 * (begin + size)], [2] * size)
            parts.append(sampler(drafted, None, rows[own].flatten(0, 1), parameters).sampled_token_ids)
        tokens = torch.cat(parts)
        return Verdict(tokens, (tokens >= 0).sum(1) - 1)

    with patched():
        sampler = make_sampler()
        played = play(method, THREE, 2, True, many, seed=2)
    assert p_of_tokens(THREE, played.tokens[kind == 1]) > ALPHA
    assert p_of_lengths(exact_reach("tokenwise", THREE, 2, True), played.accepted[kind == 1]) > ALPHA
    assert (played.tokens[kind == 0, 0] == 1).all()


def test_log_probabilities_and_constraints_are_the_packages_own() -> None:
    """Allowed tokens, and the log-probabilities of what is emitted: the same, and the logits are not touched."""
    counts = [3, 1, 0, 2] * 3
    logits = logits_of(sum(counts) + B)
    metadata = step(torch.zeros(sum(counts)), counts)
    mask = torch.rand(B, V, generator=torch.Generator().manual_seed(4)) < 0.5
    parameters = sampling(torch.zeros(B), allowed_token_ids_mask=mask, max_num_logprobs=2)
    drafts = logits.argmax(-1)[metadata.target_logits_indices]
    found = []
    for context in (nullcontext(), patched()):
        with context:
            given = logits.clone()
            found.append(make_sampler()(step(drafts, counts), None, given, parameters))
            assert torch.equal(given, logits)
    assert torch.equal(found[0].sampled_token_ids, found[1].sampled_token_ids)
    for old, new in zip(found[0].logprobs_tensors, found[1].logprobs_tensors, strict=True):
        assert old is new or torch.equal(old, new)


# Candidates (`enable_reduce_sample`) --------------------------------------------------------------------------------


@pytest.fixture
def reducing() -> None:
    """The configuration, and the real tensor-parallel group, of one process."""
    config = edge.configure(enable_reduce_sample=True)
    with set_current_vllm_config(config), cpu_runner.edge():
        cpu_runner._groups(config)


def test_greedy_over_the_workers_parts_of_the_vocabulary(reducing: None) -> None:
    counts = [3, 1, 0, 2] * 3
    logits = logits_of(sum(counts) + B)
    drafts = logits.argmax(-1)[step(torch.zeros(sum(counts)), counts).target_logits_indices]
    drafts[::4] = -1
    found = []
    for context in (nullcontext(), patched()):
        with context:
            parameters = sampling(torch.zeros(B))
            found.append(make_sampler()(step(drafts, counts), None, logits.clone(), parameters).sampled_token_ids)
    assert torch.equal(*found)


@pytest.mark.parametrize("method", ["tokenwise", "block"])
def test_drawn_tokens_from_candidates(method: str, reducing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates in any order, gathered from two workers; a draft may be no candidate (token 1 after token 1)."""
    monkeypatch.setenv("MTP_VERIFICATION", method)
    settings.cache_clear()
    many = 200_000
    ids = torch.stack([torch.tensor([2, 0, 1]), torch.tensor([0, 2, 7]), torch.tensor([1, 2, 0])])

    def verify(one: Step) -> Verdict:
        state = torch.where(one.target[:, 1] == 0, 1, torch.where(one.target[:, 2] > 0.5, 2, 0))
        own = ids[state]
        chances = torch.where(own == 7, 0.0, one.target.gather(1, own.clamp(max=2)))
        drafted = step(one.batch.tokens, [2] * many)
        is_bonus = torch.zeros(3 * many, dtype=torch.bool).index_fill(0, drafted.bonus_logits_indices.long(), True)
        g = torch.Generator().manual_seed(9)
        bonus = torch.multinomial(one.target[is_bonus], 1, generator=g).int()
        pair = (chances.log()[~is_bonus], own[~is_bonus])
        tokens = verifier.rejection_sample(
            one.batch.tokens,
            [2] * many,
            2,
            drafted.cu_num_draft_tokens,
            None,
            pair,
            bonus,
            sampling(torch.ones(many)),
        )
        return Verdict(tokens, (tokens >= 0).sum(1) - 1)

    with patched():
        played = play(verify, THREE, 2, True, many, seed=6)
    assert p_of_tokens(THREE, played.tokens) > ALPHA
    assert p_of_lengths(exact_reach(method, THREE, 2, True), played.accepted) > ALPHA


def test_candidates_through_the_real_forward(reducing: None) -> None:
    """A greedy request beside a drawn one gets its argmax; the package takes the column of it for a token."""
    logits, counts = logits_of(2 * B), [1] * B
    temperature = torch.tensor([0.0, 0.9] * (B // 2))
    best = logits.argmax(-1).view(B, 2)
    drafts = best[:, 0]
    found = []
    for context in (nullcontext(), patched()):
        with context:
            sampler = make_sampler()
            sampler.prepare_sampling(20)
            sampler.sampler.prepare_sampling(20)
            parameters = sampling(temperature, top_k=torch.full((B,), 20))
            found.append(sampler(step(drafts, counts), None, logits.clone(), parameters).sampled_token_ids)
    theirs, ours = (tokens[::2, 0].long() for tokens in found)
    assert torch.equal(ours, best[::2, 0])
    assert (theirs == 0).all(), "the best candidate stands in column 0"
    allowed = logits.topk(20).indices.view(B, 2, 20)
    assert (found[1][1::2, 0, None] == allowed[1::2, 0]).any(1).all()


def test_seeded_request_among_candidates(reducing: None) -> None:
    """Alone and in a batch the same."""
    logits = logits_of(2 * B)
    drafts = logits.argmax(-1).view(B, 2)[:, 0]

    def tokens(requests: list[int]) -> list[list[int]]:
        rows = torch.tensor([[2 * one, 2 * one + 1] for one in requests]).flatten()
        parameters = sampling(
            torch.ones(len(requests)),
            top_k=torch.full((len(requests),), 20),
            generators={i: torch.Generator().manual_seed(50 + one) for i, one in enumerate(requests)},
        )
        sampler = make_sampler()
        sampler.prepare_sampling(20)
        sampler.sampler.prepare_sampling(20)
        drafted = step(drafts[requests], [1] * len(requests))
        return sampler(drafted, None, logits[rows], parameters).sampled_token_ids.tolist()

    with patched():
        assert [tokens([one])[0] for one in range(B)] == tokens(list(range(B)))


def test_a_seed_goes_by_the_columns_of_candidates() -> None:
    """A limit that the module tells: two workers' best 8, or best 20 because another request asks for 20, hold the same
    5 tokens that top-k leaves, in other columns."""
    own = logits_of(1)
    lowest = own.topk(5).values[:, -1:]

    def candidates(many: int) -> tuple[Tensor, Tensor]:
        halves = [own[:, first : first + V // 2].topk(many) for first in (0, V // 2)]
        values = torch.cat([half.values for half in halves], 1)
        ids = torch.cat([half.indices + first for half, first in zip(halves, (0, V // 2), strict=True)], 1)
        return values.masked_fill(values < lowest, -torch.inf), ids

    drafted = step(own.argmin(-1), [1])

    def token(seed: int, many: int) -> int:
        seeded = sampling(torch.ones(1), generators={0: torch.Generator().manual_seed(seed)})
        bonus = torch.zeros(1, 1, dtype=torch.int32)
        cumulative = drafted.cu_num_draft_tokens
        given = (drafted.draft_token_ids, [1], 1, cumulative, None, candidates(many), bonus, seeded)
        return int(verifier.rejection_sample(*given)[0, 0])

    with patched():
        assert all(token(seed, 8) == token(seed, 8) for seed in range(20))
        assert any(token(seed, 8) != token(seed, 20) for seed in range(20))


def test_two_workers_with_half_a_vocabulary_each(tmp_path: Path) -> None:
    """Two processes: both emit the same, greedy what one worker with all of the vocabulary emits."""
    words = [sys.executable, str(Path(sampler_worker.__file__))]
    running = [
        subprocess.Popen([*words, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [process.communicate(timeout=600)[0] for process in running]
    found = [json.loads(text.split("TOKENS ", 1)[1]) for text in said]
    assert found[0] == found[1]
    with patched():
        wanted = make_sampler()(*sampler_worker.case(0.0)).sampled_token_ids
    assert all(step_tokens == wanted.tolist() for step_tokens in found[0]["greedy"])
    drawn = torch.tensor(found[0]["drawn"])
    assert len(drawn.unique(dim=0)) > 1 and (drawn[:, :, 1] >= 0).any(), "drawn, and some drafts accepted"
    best = sampler_worker.LOGITS.topk(sampler_worker.TOP).indices.view(sampler_worker.B, -1, sampler_worker.TOP)
    assert ((drawn[..., None] == best) | (drawn < 0)[..., None]).any(-1).all()


# Refusals, the switch, other sources --------------------------------------------------------------------------------


def call(**changes: object) -> Tensor:
    """The patched function on three drafts of one request."""
    drafted = step(torch.zeros(3), [3])
    arguments = {
        "draft_token_ids": drafted.draft_token_ids,
        "num_draft_tokens": [3],
        "max_spec_len": 3,
        "cu_num_draft_tokens": drafted.cu_num_draft_tokens,
        "draft_probs": None,
        "target_logits_or_tuple": logits_of(3),
        "bonus_token_ids": torch.zeros(1, 1, dtype=torch.int32),
        "sampling_metadata": sampling(torch.ones(1)),
    }
    return verifier.rejection_sample(**(arguments | changes))


def test_entropy_verification_is_refused_where_the_sampler_is_made() -> None:
    edge.configure(rejection_sampler_config={"enable_entropy_verify": True})
    make_sampler()
    with patched():
        for refused in (make_sampler, call):
            with pytest.raises(ValueError, match=r"enable_entropy_verify.*mtp\.patches\.sampler: false"):
                refused()


def test_synthetic_mode_and_probabilities_of_candidates_are_refused() -> None:
    with patched():
        with pytest.raises(ValueError, match="synthetic"):
            call(synthetic_mode=True)
        with pytest.raises(NotImplementedError, match="enable_reduce_sample with draft probabilities"):
            call(
                draft_probs=torch.full((3, V), 1 / V),
                target_logits_or_tuple=(logits_of(3), torch.arange(V).repeat(3, 1)),
            )


def test_which_method_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """`enable_block_verify` is our block method, unless MTP_VERIFICATION names another."""
    for asked, block, wanted in (
        ("", False, "tokenwise"),
        ("auto", True, "block"),
        ("tokenwise", True, "tokenwise"),
        ("block", False, "block"),
    ):
        edge.configure(rejection_sampler_config={"enable_block_verify": block})
        monkeypatch.setenv("MTP_VERIFICATION", asked)
        settings.cache_clear()
        assert method_for(verifier.get_ascend_config(), False, 3) == wanted
    monkeypatch.setenv("MTP_VERIFICATION", "both")
    settings.cache_clear()
    with patched(), pytest.raises(ValueError, match="'both'"):
        make_sampler()


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named in the registry; switched off it is not chosen, and what the package has stays in place."""
    assert PATCH in registry.PATCHES
    old = verifier.rejection_sample
    others = [patch.name for patch in registry.PATCHES if patch is not PATCH]
    monkeypatch.setenv(install.VARIABLE, ",".join(others) or "none")
    assert PATCH not in install.chosen()
    monkeypatch.setenv(install.VARIABLE, "none")
    monkeypatch.setattr(install, "_tell", lambda found, patches: None)
    install.enter("worker")
    assert verifier.rejection_sample is old and not hasattr(old, "mtp_runtime")
    monkeypatch.setenv(install.VARIABLE, "sampler")
    with patched():  # puts the package's back at the end
        new = verifier.rejection_sample
        install.enter("worker")
        assert verifier.rejection_sample is new is not old
    assert verifier.rejection_sample is old


@pytest.mark.parametrize("target", PATCH.targets, ids=str)
def test_another_source_is_refused(target: patches.Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """One changed line in any of the targets: nothing at all is replaced."""
    text = patches.installed_text(target.module)
    name = target.name.split(".")[-1]
    begin = text.index(f"def {name}(")
    changed = text[:begin] + text[begin:].replace(":\n", ":  # changed\n", 1)
    assert digest(changed, target.name) != digest(text, target.name)
    read = patches.installed_text
    monkeypatch.setattr(patches, "installed_text", lambda m: changed if m == target.module else read(m))
    old = verifier.rejection_sample
    with pytest.raises(PatchRefused, match=rf"patch sampler: {target}.*has another source.*sampler: false"):
        PATCH.apply()
    assert verifier.rejection_sample is old


def test_the_other_release_has_the_same_sources() -> None:
    for target in PATCH.targets:
        target.check((OTHER_RELEASE / f"{target.module.replace('.', '/')}.py").read_text())


def test_the_random_numbers_are_the_workers_own() -> None:
    """torch's generator is where it was: what else draws from it is not disturbed."""
    worker_generator.cache_clear()
    with patched():
        torch.manual_seed(1)
        call()
        found = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(found, torch.rand(1))
