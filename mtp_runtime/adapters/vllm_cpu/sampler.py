"""Our verification in the place of vLLM's rejection sampler.

The subclass keeps what surrounds verification in vLLM (logits processors, the bonus token's sampler,
log-probabilities) and decides every acceptance, recovered and bonus token itself: in the greedy fast path below, else
in `decide`, which replaces the function vLLM's sampler calls.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample import rejection_sampler as engine
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor as MinTokens
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from mtp_runtime.adapters.vllm_cpu.counters import Count
from mtp_runtime.adapters.vllm_cpu.settings import InjectedFault, settings
from mtp_runtime.adapters.vllm_cpu.steps import Step, watch
from mtp_runtime.metrics import names
from mtp_runtime.verify import PLACEHOLDER, DraftBatch, Noise, choose, verify_greedy, verify_mixed
from mtp_runtime.verify.batch import expand_to_tokens

EngineSampler = engine.RejectionSampler


class MtpRejectionSampler(EngineSampler):  # type: ignore[misc, valid-type]
    """vLLM's sampler with our verification. Made by the model runner, once, where speculative decoding is on."""

    def __init__(self, sampler: Any, spec_config: Any = None, device: torch.device | None = None) -> None:
        super().__init__(sampler, spec_config, device)
        if self.synthetic_mode:
            raise ValueError(
                "rejection_sample_method 'synthetic' is not verification: remove it from --speculative-config"
            )
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        watch(GPUModelRunner)
        self._fault = settings().fault == "verify"
        self._calls = Count(names.PLUGIN_VERIFY_CALLS)
        self._draft_steps = Count(names.PLUGIN_VERIFY_DRAFT_STEPS)
        self._placeholder_steps = Count(names.PLUGIN_PLACEHOLDER_STEPS)
        self._placeholders = Count(names.PLUGIN_PLACEHOLDER_TOKENS)

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Verify one step. Shapes as in vLLM: logits [T + B, V], draft_probs [T, V] or None."""
        if Step.draft_rows:  # not in a dummy run
            if self._fault:
                raise InjectedFault("verify")
            self._count(metadata)
        if not metadata.draft_token_ids.numel():
            # Every request was listed with zero drafts, which vLLM's own sampler does not survive with top-k.
            return self.sampler(logits=logits, sampling_metadata=sampling_metadata)
        if not is_plain_greedy(sampling_metadata):
            return super().forward(metadata, draft_probs, logits, sampling_metadata)
        # Nothing but the argmax matters: one pass over all rows, target and bonus alike.
        best = self.sampler.greedy_sample(logits)
        batch = DraftBatch(metadata.draft_token_ids, metadata.num_draft_tokens, best[metadata.bonus_logits_indices])
        verdict = verify_greedy(batch, best[metadata.target_logits_indices])
        return SamplerOutput(sampled_token_ids=verdict.tokens, logprobs_tensors=None)

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


def is_plain_greedy(sampling: SamplingMetadata) -> bool:
    """Whether every request takes the argmax of its raw logits and wants no log-probabilities."""
    holder = sampling.thinking_budget_state_holder
    return bool(
        sampling.all_greedy
        and sampling.max_num_logprobs is None
        and not sampling.logprob_token_ids
        and sampling.no_penalties
        and sampling.allowed_token_ids_mask is None
        and not sampling.bad_words_token_ids
        and all(isinstance(p, MinTokens) and not p.min_toks for p in sampling.logitsprocs.non_argmax_invariant)
        and (holder is None or not holder.has_tracked_requests())
    )


def decide(
    draft_token_ids: torch.Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    cu_num_draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_logits: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    sampling_metadata: SamplingMetadata,
    synthetic_mode: bool = False,
    synthetic_conditional_rates: torch.Tensor | None = None,
    use_fp64_gumbel: bool = False,
) -> torch.Tensor:
    """Replaces `vllm.v1.sample.rejection_sampler.rejection_sample`, same arguments.

    target_logits [T, V]: after every logits processor, temperature, top-k and top-p. Returns [B, max_spec_len + 1]
    int32.
    """
    batch = DraftBatch(draft_token_ids, num_draft_tokens, bonus_token_ids[:, 0])
    argmax = target_logits.argmax(dim=-1)
    if sampling_metadata.all_greedy:
        return verify_greedy(batch, argmax).tokens
    greedy = sampling_metadata.temperature == engine.GREEDY_TEMPERATURE
    target = target_logits.softmax(dim=-1, dtype=torch.float32)
    noise = draw(num_draft_tokens, target.shape[1], sampling_metadata.generators, target.device)
    verify = choose(settings().verification, draft_probs is not None)
    return verify_mixed(batch, greedy, argmax, target, draft_probs, noise, verify).tokens


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Replaces the function of the same name, which vLLM uses for temperature, top-k and top-p of the drafts.

    In 0.32.0 its CPU kernel writes into a 64-bit copy of anything that is not int64 and drops it: temperatures and
    limits of drafts are then whatever memory held before.
    """
    return expand_to_tokens(x, cu_num_tokens, replace_from, replace_to)


def draw(counts: list[int], vocab: int, generators: dict[int, torch.Generator], device: torch.device) -> Noise:
    """The random numbers of a step; a request with a seed takes its own from its generator, whatever else is in the
    batch.

    Uniform numbers are float64: in float32 an exact 0 is likely enough to matter.
    """
    uniform = torch.rand(sum(counts), dtype=torch.float64, device=device)
    race = torch.empty(len(counts), vocab, dtype=torch.float32, device=device).exponential_()
    for request, generator in generators.items():
        if not counts[request]:  # takes the bonus token, for which vLLM's sampler draws
            continue
        start = sum(counts[:request])
        uniform[start : start + counts[request]].uniform_(generator=generator)
        race[request].exponential_(generator=generator)
    return Noise(uniform, race)
