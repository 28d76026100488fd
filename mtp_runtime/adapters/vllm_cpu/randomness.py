"""Random numbers of requests with a seed: a function of seed and position (`verify.keyed`), wherever they are drawn.

vLLM's generators advance with every draw, so what a seed yields depends on how many drafts were tried before. Here the
sampler of steps without drafts, verification and the drafter use the same keyed race: for equal logits a seeded request
gets the same tokens with and without drafts, alone, in any batch and after preemption.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from mtp_runtime.adapters.vllm_cpu.constraints import GREEDY_BELOW
from mtp_runtime.adapters.vllm_cpu.steps import deeper, draft_positions, row_positions, sampled
from mtp_runtime.verify import keyed
from mtp_runtime.verify.recover import draw
from mtp_runtime.verify.seeded import Generators, keys, worker_generator


class KeyedTopKTopP(nn.Module):
    """In the place of vLLM's `TopKTopPSampler` for steps without drafts: requests with a seed race with keyed numbers.

    The others go through vLLM's own.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(
        self, logits: Tensor, generators: Generators, k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens [B] and, in a processed log-probability mode, what vLLM's sampler returns beside them."""
        sampled(lambda: row_positions() + 1)
        if not generators:
            return self.inner(logits, generators, k, p)
        positions = row_positions()
        if positions.shape[0] != logits.shape[0]:  # a dummy run
            return self.inner(logits, generators, k, p)
        requests, seeds = keys(generators, logits.device)
        limits = (None if limit is None else limit[requests] for limit in (k, p))
        own = apply_top_k_top_p(logits[requests], *limits).softmax(-1, dtype=torch.float32)
        tokens, returned = self.inner(logits, {}, k, p)
        tokens[requests] = keyed.race(own, seeds, positions[requests]).to(tokens.dtype)
        return tokens, returned


def cached_draft_probs(runner: Any, metadata: Any) -> Tensor | None:
    """In the place of `GPUModelRunner._get_spec_decode_draft_probs`: q [T, V] of the drafts that are verified now.

    A request that joins or was preempted has none: its rows are one-hot at its drafts (at token 0 for a placeholder,
    which is rejected without a look). vLLM gives up the whole batch's then. None where no request has any.
    """
    known, owners = runner._draft_probs, runner._draft_prob_req_ids
    if known is None or owners is None:
        return None
    row = {request: index for index, request in enumerate(owners)}
    parts, start = [], 0
    for request, count in zip(runner.input_batch.req_ids, metadata.num_draft_tokens, strict=True):
        if count and request in row:
            parts.append(known[row[request], :count])
        elif count:
            drafts = metadata.draft_token_ids[start : start + count].clamp(min=0).long()
            parts.append(known.new_zeros(count, known.shape[-1]).scatter_(1, drafts[:, None], 1.0))
        start += count
    return torch.cat(parts) if parts else None


def sample_drafts(logits: Tensor, sampling: SamplingMetadata, use_fp64_gumbel: bool = False) -> tuple[Tensor, Tensor]:
    """Replaces `vllm.v1.spec_decode.llm_base_proposer.compute_probs_and_sample_next_token`.

    logits: [B, V] of one draft depth. Returns the drafts [B] and the distribution q [B, V] they were drawn from; q of a
    greedy request is its plain softmax, which greedy verification does not read. Seeded requests race with the numbers
    the target will use at that position, so that draft and target tend to the same token.
    """
    depth = deeper()
    best = logits.argmax(-1)
    if sampling.all_greedy:
        return best, logits
    assert sampling.temperature is not None
    greedy = sampling.temperature < GREEDY_BELOW
    q = logits.float().div(torch.where(greedy, 1.0, sampling.temperature)[:, None]).softmax(-1)
    generator = worker_generator(keyed.DRAFT, q.device)
    tokens = draw(q, torch.rand(q.shape[0], generator=generator, dtype=torch.float64, device=q.device))
    if sampling.generators:
        requests, seeds = keys(sampling.generators, q.device)
        tokens[requests] = keyed.race(q[requests], seeds, draft_positions(depth)[requests])
    return torch.where(greedy, best, tokens), q
