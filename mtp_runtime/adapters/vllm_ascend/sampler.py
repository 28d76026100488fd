"""Patch `sampler`: AscendRejectionSampler decides with our verification.

What the package's `rejection_sample` is asked for, and what becomes of it here:

| asked for                                    | here                                                               |
|----------------------------------------------|--------------------------------------------------------------------|
| greedy, drawn and mixed batches, ragged      | ours                                                               |
| placeholder drafts (-1), no drafts at all    | ours: rejected for certain; the bonus token alone                  |
| draft probabilities                          | ours (the package's runner has none)                               |
| `enable_block_verify`                        | our block method, which is lossless; the package's is not          |
| `enable_reduce_sample`: candidates and tokens| ours; with draft probabilities too it is refused, nothing asks     |
| `enable_reduce_sample`, all greedy           | the argmax over all workers by the package's own function          |
| `enable_entropy_verify`                      | refused where the sampler is made: it changes the distribution     |
| synthetic mode                               | refused: it is not verification (the package ignores it)           |
| requests with a seed                         | numbers of seed and position, see `positions`                      |

Numbers of a seed go by the logits' columns. Candidates of two and more workers stand in other columns when the batch's
largest top-k changes: with `enable_reduce_sample` and TP a seed's tokens depend on what else is in the batch.

MTP_VERIFICATION (auto, tokenwise, block; default auto) chooses the method, `enable_block_verify` only where it is auto.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from mtp_runtime.adapters.settings import settings
from mtp_runtime.adapters.vllm_ascend.patches import Patch, Target
from mtp_runtime.adapters.vllm_ascend.positions import Sampling, drawn_positions, replace_sample
from mtp_runtime.choice import choose_method
from mtp_runtime.verify import PLACEHOLDER, STRATEGIES, DraftBatch, Noise, Verdict, keyed, verify_mixed
from mtp_runtime.verify.sampled_bonus import as_columns, as_tokens, certain_rows, chosen_rows, exact_tokens
from mtp_runtime.verify.seeded import Generators, enter_seeded, keys, race_seeded, worker_generator
from mtp_runtime.verify.strategy import verify_known

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM's sampler; a request can ask for 0 or for 0.01 and more."""
ENTROPY = (
    "rejection_sampler_config.enable_entropy_verify accepts more drafts than the target's distribution allows: remove "
    "it from additional_config, or give verification back to vllm-ascend with mtp.patches.sampler: false"
)


def check_config(config: Any) -> None:
    """Raises ValueError for an AscendConfig whose verification cannot be ours."""
    if config.rejection_sampler_config.enable_entropy_verify:
        raise ValueError(ENTROPY)


def method_for(config: Any, has_draft_probs: bool, k: int) -> str:
    """A key of STRATEGIES. Raises ValueError for an unknown MTP_VERIFICATION."""
    asked = settings().verification
    if asked == "auto" and config.rejection_sampler_config.enable_block_verify:
        asked = "block"
    return choose_method(asked, has_draft_probs, max(k, 1)).method


def replace_init(original: Any) -> Any:
    """For `AscendRejectionSampler.__init__`: what is refused is refused before a request comes."""
    from vllm_ascend.ascend_config import get_ascend_config

    @functools.wraps(original)
    def __init__(self: Any, sampler: Any) -> None:
        check_config(get_ascend_config())
        method_for(get_ascend_config(), False, 1)
        original(self, sampler)

    return __init__


def replace_rejection_sample(_original: Any) -> Any:
    """For `rejection_sample`, with its signature; nothing of the old one is called."""
    from vllm_ascend.ascend_config import get_ascend_config
    from vllm_ascend.sample.rejection_sampler import greedy_sample

    def rejection_sample(
        draft_token_ids: Tensor,
        num_draft_tokens: list[int],
        max_spec_len: int,
        cu_num_draft_tokens: Tensor,
        draft_probs: Tensor | None,
        target_logits_or_tuple: Tensor | tuple[Tensor, Tensor | None],
        bonus_token_ids: Tensor,
        sampling_metadata: Any,
        synthetic_mode: bool = False,
        synthetic_conditional_rates: Tensor | None = None,
        ori_target_logits: Tensor | None = None,
    ) -> Tensor:
        """[B, max_spec_len + 1] int32: accepted drafts, the recovered or bonus token, then -1.

        draft_token_ids [T], -1 for placeholders; num_draft_tokens [B] on the host; cu_num_draft_tokens [B]; draft_probs
        [T, V] or None; target: logits [T, V] after all constraints, or (candidates' logits [T, C], their tokens
        [T, C]), not changed; bonus_token_ids [B, 1]. Raises ValueError, NotImplementedError for what is refused.
        """
        config = get_ascend_config()
        check_config(config)
        if synthetic_mode:
            raise ValueError("rejection_sample_method 'synthetic' is not verification: remove it")
        pair = target_logits_or_tuple
        logits, ids = pair if isinstance(pair, tuple) else (pair, None)
        batch = DraftBatch(draft_token_ids, cu_num_draft_tokens, max_spec_len)
        bonus = bonus_token_ids.view(-1)
        if not batch.total:
            return torch.nn.functional.pad(bonus[:, None], (0, max_spec_len), value=PLACEHOLDER).int()
        if sampling_metadata.all_greedy:
            best = greedy_sample(logits) if config.enable_reduce_sample else logits.argmax(-1)
            return exact_tokens(batch, best, bonus)
        if ids is not None and draft_probs is not None:
            raise NotImplementedError("enable_reduce_sample with draft probabilities: nothing of vllm-ascend asks it")
        method = method_for(config, draft_probs is not None, max_spec_len)
        work = as_columns(batch, ids)
        verdict = _decide(work, num_draft_tokens, draft_probs, logits, sampling_metadata, method)
        return as_tokens(batch, verdict, ids, bonus).tokens

    return rejection_sample


def _decide(
    batch: DraftBatch, counts: list[int], draft_probs: Tensor | None, logits: Tensor, sampling: Any, method: str
) -> Verdict:
    """The verdict in columns of logits [T, C]; what it says of bonus tokens means nothing."""
    chosen = exact = None
    if not sampling.all_random:
        chosen = chosen_rows(batch, logits.argmax(-1), batch.counts.new_zeros(batch.size))
        exact = sampling.temperature < GREEDY_BELOW
    rows = certain_rows(batch, logits.softmax(-1, dtype=torch.float32))
    seeded: Generators = sampling.generators
    if seeded:
        known = Sampling.verified
        positions = drawn_positions(counts, seeded, rows.device) if known is None else known()
        chosen, exact = enter_seeded(batch, race_seeded(rows, counts, seeded, positions), exact, chosen)
    if exact is not None and chosen is not None and len(seeded) == batch.size:
        return verify_known(batch, chosen)
    noise = Noise.drawn(batch, worker_generator(keyed.ACCEPT, rows.device))
    verify = STRATEGIES[method]
    if exact is None or chosen is None:
        return verify(batch, rows, draft_probs, noise)
    return verify_mixed(batch, chosen, exact, rows, draft_probs, noise, verify)


def replace_random_sample(original: Any) -> Any:
    """For the sampler's `random_sample`, steps without drafts and bonus tokens: seeded requests race, see `keyed`."""

    @functools.wraps(original)
    def random_sample(probs: Tensor, generators: Generators) -> Tensor:
        known = Sampling.sampled
        if not generators or known is None:
            return original(probs, generators)
        positions = known()
        requests, seeds = keys(generators, probs.device)
        raced = keyed.race(probs[requests], seeds, positions[requests])
        tokens = original(probs, {})  # changes probs
        return tokens.index_copy(0, requests, raced.to(tokens.dtype))

    return random_sample


MODULE = "vllm_ascend.sample.rejection_sampler"
PATCH = Patch(
    "sampler",
    "worker",
    "lossless verification, token by token or in blocks; seeds that hold alone, in a batch and after preemption",
    (
        Target(MODULE, "rejection_sample", ("41f0f9d8b4c13d65",), replace_rejection_sample),
        Target(MODULE, "AscendRejectionSampler.__init__", ("489bd2978d6b7a7f",), replace_init),
        Target("vllm_ascend.sample.sampler", "random_sample", ("3cbb993468a8e0cb",), replace_random_sample),
        Target("vllm_ascend.worker.model_runner_v1", "NPUModelRunner._sample", ("25e3f6bd6507c3e2",), replace_sample),
    ),
)
