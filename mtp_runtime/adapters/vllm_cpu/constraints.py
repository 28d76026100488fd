"""Sampling constraints on every verified position, in the order and with the functions of vLLM's own sampler.

Row j of a request stands behind its j first drafts: whatever depends on the tokens so far (penalties, bad words,
minimum length) sees those drafts too. The bonus row is a row like the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.bad_words import apply_bad_words_with_drafts
from vllm.v1.sample.ops.penalties import apply_all_penalties
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from mtp_runtime.verify import DraftBatch, to_rows

WITH_FORM_FOR_DRAFTS = (MinTokensLogitsProcessor, LogitBiasLogitsProcessor, MinPLogitsProcessor)
"""vLLM's processors that have a form for drafts here; a server with others does not start (`install`)."""

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM's sampler."""


def constrain(logits: Tensor, batch: DraftBatch, counts: list[int], sampling: SamplingMetadata) -> Tensor:
    """Logits [R, V] of every row after everything that can change an argmax: a new float32 tensor, or `logits`
    themselves where no request asks for anything of that kind.

    logits: [R, V], not changed; counts: drafts of each request, on the host.
    """
    if unconstrained(sampling):
        return logits
    rows = logits.to(torch.float32, copy=True)
    widths = [count + 1 for count in counts]
    if sampling.allowed_token_ids_mask is not None:
        rows.masked_fill_(to_rows(batch, sampling.allowed_token_ids_mask), float("-inf"))
    past = _past_tokens(batch, counts, sampling)
    if sampling.bad_words_token_ids:
        apply_bad_words_with_drafts(rows, sampling.bad_words_token_ids, past, widths)
    for processor in sampling.logitsprocs.non_argmax_invariant:
        rows = _apply(processor, rows, widths)
    if not sampling.no_penalties:
        index = to_rows(batch, torch.arange(batch.size, device=rows.device))
        penalties = (sampling.presence_penalties, sampling.frequency_penalties, sampling.repetition_penalties)
        assert sampling.prompt_token_ids is not None
        rows = apply_all_penalties(rows, sampling.prompt_token_ids[index], *(p[index] for p in penalties), past)
    return _thinking_budget(rows, batch, sampling)


def unconstrained(sampling: SamplingMetadata) -> bool:
    """Whether no request asks for anything that can change an argmax."""
    holder = sampling.thinking_budget_state_holder
    return bool(
        sampling.no_penalties
        and sampling.allowed_token_ids_mask is None
        and not sampling.bad_words_token_ids
        and all(_idle(processor) for processor in sampling.logitsprocs.non_argmax_invariant)
        and (holder is None or not holder.has_tracked_requests())
    )


def _idle(processor: Any) -> bool:
    """Whether a logits processor has no request to act on."""
    if isinstance(processor, MinTokensLogitsProcessor):
        return not processor.min_toks
    return isinstance(processor, LogitBiasLogitsProcessor) and not processor.biases


def shape(rows: Tensor, batch: DraftBatch, sampling: SamplingMetadata, out: Tensor) -> Tensor:
    """Temperature, min-p, top-k and top-p on constrained rows [R, V], which are not changed.

    out: [R, V] float32 memory for the result; limits may put it into memory of their own. Greedy requests keep their
    logits: temperature 1, and no limit can take the best token away.
    """
    assert sampling.temperature is not None
    temperature = sampling.temperature
    if not sampling.all_random:
        temperature = torch.where(temperature < GREEDY_BELOW, 1.0, temperature)
    rows = torch.div(rows, to_rows(batch, temperature)[:, None], out=out)
    for processor in sampling.logitsprocs.argmax_invariant:
        rows = _apply_min_p(processor, rows, batch)
    if sampling.top_k is None and sampling.top_p is None:
        return rows
    limits = (None if limit is None else to_rows(batch, limit) for limit in (sampling.top_k, sampling.top_p))
    return apply_top_k_top_p(rows, *limits)


def _past_tokens(batch: DraftBatch, counts: list[int], sampling: SamplingMetadata) -> list[list[int]]:
    """The output tokens before each row, drafts included; empty where nothing needs them.

    A row behind a placeholder is never emitted: it sees the tokens before the placeholder.
    """
    if sampling.no_penalties and not sampling.bad_words_token_ids:
        return []
    drafts, past, start = batch.tokens.tolist(), [], 0
    for output, count in zip(sampling.output_token_ids, counts, strict=True):
        past.append(output)
        for draft in drafts[start : start + count]:
            past.append([*past[-1], draft] if draft >= 0 else past[-1])
        start += count
    return past


def _apply(processor: Any, rows: Tensor, widths: list[int]) -> Tensor:
    """A processor that can change an argmax, on every row."""
    if isinstance(processor, MinTokensLogitsProcessor):
        return processor.apply_with_spec_decode(rows, widths)
    if isinstance(processor, LogitBiasLogitsProcessor):
        return _apply_bias(processor.biases, rows, widths)
    # vLLM refuses processors of its users together with drafts, so this is a new one of its own.
    raise NotImplementedError(f"logits processor {type(processor).__name__} has no form for drafts")


def _apply_bias(biases: dict[int, dict[int, float]], rows: Tensor, widths: list[int]) -> Tensor:
    index: list[int] = []
    tokens: list[int] = []
    values: list[float] = []
    for request, bias in biases.items():
        first = sum(widths[:request])
        for row in range(first, first + widths[request]):
            index += [row] * len(bias)
            tokens += bias.keys()
            values += bias.values()
    if index:
        where = tuple(torch.tensor(part, device=rows.device) for part in (index, tokens))
        rows[where] += torch.tensor(values, dtype=rows.dtype, device=rows.device)
    return rows


def _apply_min_p(processor: Any, rows: Tensor, batch: DraftBatch) -> Tensor:
    """Tokens below min_p times the best probability are out; in logarithms no softmax is needed."""
    if not isinstance(processor, MinPLogitsProcessor):
        raise NotImplementedError(f"logits processor {type(processor).__name__} has no form for drafts")
    if not processor.min_p_count:
        return rows
    floor = rows.amax(-1, keepdim=True) + to_rows(batch, processor.min_p[:, 0]).log()[:, None]
    return rows.masked_fill_(rows < floor, float("-inf"))


def _thinking_budget(rows: Tensor, batch: DraftBatch, sampling: SamplingMetadata) -> Tensor:
    """vLLM's budget for reasoning, which has a form for drafts and one for the bonus row."""
    holder = sampling.thinking_budget_state_holder
    if holder is None or not holder.has_tracked_requests():
        return rows
    spec = sampling.spec_token_ids
    holder.update_state(sampling.output_token_ids, spec, repeat_indices=None)
    bonus = batch.first_row + batch.counts
    rows[bonus] = holder.apply_to_logits(rows[bonus], True, spec)
    rows[batch.draft_rows] = holder.apply_to_logits(rows[batch.draft_rows], False, spec)
    return rows
