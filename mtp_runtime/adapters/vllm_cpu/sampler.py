"""Our verification in the place of vLLM's rejection sampler: from the target's logits to the tokens of each request."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample import rejection_sampler as engine
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from mtp_runtime.adapters.counters import Count
from mtp_runtime.adapters.settings import InjectedFault, settings
from mtp_runtime.adapters.vllm_cpu.constraints import GREEDY_BELOW, constrain, shape, unconstrained
from mtp_runtime.adapters.vllm_cpu.randomness import KeyedTopKTopP
from mtp_runtime.adapters.vllm_cpu.steps import Step, row_positions, sampled
from mtp_runtime.choice import choose_method
from mtp_runtime.metrics import names
from mtp_runtime.verify import (
    PLACEHOLDER,
    STRATEGIES,
    DraftBatch,
    Noise,
    Verdict,
    keyed,
    verify_exact,
    verify_mixed,
)
from mtp_runtime.verify.seeded import enter_seeded, race_seeded, worker_generator

EngineSampler = engine.RejectionSampler


class MtpRejectionSampler(EngineSampler):  # type: ignore[misc, valid-type]
    """vLLM's sampler with our verification. Made by the model runner, once, where speculative decoding is on."""

    def __init__(self, sampler: Any, spec_config: Any = None, device: torch.device | None = None) -> None:
        super().__init__(sampler, spec_config, device)
        if self.synthetic_mode:
            raise ValueError(
                "rejection_sample_method 'synthetic' is not verification: remove it from --speculative-config"
            )
        sampler.topk_topp_sampler = KeyedTopKTopP(sampler.topk_topp_sampler)
        self._generator = worker_generator(keyed.ACCEPT, torch.device(device or "cpu"))
        self._memory = torch.empty(0)
        self.method = settings().verification
        self._fault = settings().fault == "verify"
        self._calls = Count(names.PLUGIN_VERIFY_CALLS)
        self._draft_steps = Count(names.PLUGIN_VERIFY_DRAFT_STEPS)
        self._placeholder_steps = Count(names.PLUGIN_PLACEHOLDER_STEPS)
        self._placeholders = Count(names.PLUGIN_PLACEHOLDER_TOKENS)

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: Tensor | None,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Verify one step. logits: [R, V], each request's draft rows, then its bonus row, not changed; draft_probs:
        [T, V] or None."""
        if Step.draft_rows:  # not in a dummy run, nor where every request is listed with zero drafts
            if self._fault:
                raise InjectedFault("verify")
            self._count(metadata)
        batch = DraftBatch(metadata.draft_token_ids, metadata.cu_num_draft_tokens, metadata.max_spec_len)
        if is_plain_greedy(sampling_metadata):
            # Nothing but the argmax matters: one pass over all rows, target and bonus alike.
            verdict = verify_exact(batch, self._argmax(logits))
            logprobs = None
        else:
            verdict, processed = self._decide(metadata, batch, draft_probs, logits, sampling_metadata)
            logprobs = self._logprobs(batch, verdict, logits if processed is None else processed, sampling_metadata)
        # The first row of a request predicts its next token, accepted drafts follow that.
        sampled(lambda: row_positions(metadata.logits_indices)[batch.first_row] + verdict.accepted + 1)
        return SamplerOutput(sampled_token_ids=verdict.tokens, logprobs_tensors=logprobs)

    def _decide(
        self,
        metadata: SpecDecodeMetadata,
        batch: DraftBatch,
        draft_probs: Tensor | None,
        logits: Tensor,
        sampling: SamplingMetadata,
    ) -> tuple[Verdict, Tensor | None]:
        """The verdict, and the processed logits [R, V] where a log-probability mode asks for them."""
        counts = metadata.num_draft_tokens
        rows = constrain(logits, batch, counts, sampling)
        if sampling.all_greedy:
            verdict = verify_exact(batch, self._argmax(rows))
            return verdict, rows if self.is_processed_logprobs_mode else None
        seeded = sampling.generators
        chosen = None if sampling.all_random else self._argmax(rows)
        rows = shape(rows, batch, sampling, self._scratch(rows))
        wanted = self.is_processed_logprobs_mode and wants_logprobs(sampling)
        processed = rows.clone() if wanted else None
        probs = torch.softmax(rows, dim=-1, out=rows)
        exact = None if chosen is None else sampling.temperature < GREEDY_BELOW
        if seeded:
            positions = row_positions(metadata.logits_indices)
            chosen, exact = enter_seeded(batch, race_seeded(probs, counts, seeded, positions), exact, chosen)
        if exact is not None and len(seeded) == batch.size:
            return verify_exact(batch, chosen), processed
        noise = Noise.drawn(batch, self._generator)
        method = choose_method(self.method, draft_probs is not None, max(batch.width, 1)).method
        verify = STRATEGIES[method]
        if exact is None:
            return verify(batch, probs, draft_probs, noise), processed
        return verify_mixed(batch, chosen, exact, probs, draft_probs, noise, verify), processed

    def _argmax(self, rows: Tensor) -> Tensor:
        """[R], with vLLM's kernel, which knows float32 only."""
        return self.sampler.greedy_sample(rows.to(torch.float32))

    def _scratch(self, like: Tensor) -> Tensor:
        """Float32 memory of this shape that is kept between steps: fresh pages would cost as much as a pass."""
        if self._memory.numel() < like.numel():
            self._memory = torch.empty(like.numel(), dtype=torch.float32, device=like.device)
        return self._memory[: like.numel()].view_as(like)

    def forget(self) -> None:
        """Give the memory kept between steps back."""
        self._memory = torch.empty(0)

    def _logprobs(
        self, batch: DraftBatch, verdict: Verdict, source: Tensor, sampling: SamplingMetadata
    ) -> LogprobsTensors | None:
        """Of each emitted token, from the row of source [R, V] that decided it; tokens not emitted get some row, vLLM
        filters them."""
        if not wants_logprobs(sampling):
            return None
        place = torch.arange(batch.width + 1, device=source.device)
        index = (batch.first_row[:, None] + place).clamp_(max=source.shape[0] - 1).flatten()
        values = source[index].float()
        if not self.is_logits_logprobs_mode:
            values = self.sampler.compute_logprobs(values)
        emitted = verdict.tokens.flatten().clamp(min=0).long()
        best = self.sampler.gather_logprobs(values, sampling.max_num_logprobs or 0, emitted)
        return name_tokens(best, values, batch.width + 1, sampling.logprob_token_ids or {})

    def _count(self, metadata: SpecDecodeMetadata) -> None:
        self._calls.add()
        self._draft_steps.add(sum(1 for count in metadata.num_draft_tokens if count))
        drafts = metadata.draft_token_ids.tolist()
        if PLACEHOLDER not in drafts:
            return
        start = 0
        for count in metadata.num_draft_tokens:
            padding = drafts[start : start + count].count(PLACEHOLDER)
            self._placeholders.add(padding)
            self._placeholder_steps.add(int(padding == count > 0))
            start += count


def name_tokens(best: LogprobsTensors, values: Tensor, rows: int, wanted: dict[int, list[int]]) -> LogprobsTensors:
    """`best` with the tokens that some requests name instead of their best ones.

    values: [B * rows, V], `rows` a request; wanted: request -> token ids. Columns that a row does not need hold token 0
    at minus infinity, as vLLM pads them; the first column stays the emitted token.
    """
    if not wanted:
        return best
    kept = best.logprobs.shape[1]
    width = max(kept, 1 + max(map(len, wanted.values())))
    ids = torch.nn.functional.pad(best.logprob_token_ids, (0, width - kept))
    logprobs = torch.nn.functional.pad(best.logprobs, (0, width - kept), value=float("-inf"))
    for request, tokens in wanted.items():
        own = slice(request * rows, (request + 1) * rows)
        named = torch.tensor(tokens, dtype=torch.int64, device=values.device)
        ids[own, 1:], logprobs[own, 1:] = 0, float("-inf")
        ids[own, 1 : 1 + len(tokens)] = named.int()
        logprobs[own, 1 : 1 + len(tokens)] = values[own][:, named]
    return LogprobsTensors(ids, logprobs, best.selected_token_ranks)


def wants_logprobs(sampling: SamplingMetadata) -> bool:
    """Whether a request wants log-probabilities, of the best tokens or of tokens it names."""
    return sampling.max_num_logprobs is not None or bool(sampling.logprob_token_ids)


def is_plain_greedy(sampling: SamplingMetadata) -> bool:
    """Whether every request takes the argmax of its raw logits and wants no log-probabilities."""
    return bool(sampling.all_greedy and not wants_logprobs(sampling) and unconstrained(sampling))
