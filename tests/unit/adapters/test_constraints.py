"""Every row gets what vLLM's own sampler, without drafts, gives a request that has emitted the drafts before it.

Both sides are vLLM's real processors; the rows of a batch with drafts go through ours, each row alone through vLLM's.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="needs the engine environment")
pytest.importorskip("vllm", reason="needs the engine environment")

from vllm import SamplingParams  # noqa: E402
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors  # noqa: E402
from vllm.v1.sample.logits_processor.interface import BatchUpdate  # noqa: E402
from vllm.v1.sample.metadata import SamplingMetadata  # noqa: E402
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p  # noqa: E402
from vllm.v1.sample.sampler import Sampler  # noqa: E402

from mtp_runtime.adapters.vllm_cpu.constraints import WITH_FORM_FOR_DRAFTS, constrain, shape  # noqa: E402
from mtp_runtime.verify import DraftBatch  # noqa: E402

pytestmark = pytest.mark.engine

VOCAB = 37
COUNTS = [2, 0, 3, 1, 3]
CPU = torch.device("cpu")


class Limits:
    """What the processors read of vLLM's configuration."""

    class scheduler_config:
        max_num_seqs = 16


def request(seed: int) -> dict:
    """A request with every constraint at once, its tokens so far among them."""
    draw = random.Random(seed)
    output = [draw.randrange(VOCAB) for _ in range(draw.randrange(2, 7))]
    params = SamplingParams(
        temperature=draw.choice([0.0, 0.5, 1.0, 1.7]),
        min_p=draw.choice([0.0, 0.05, 0.3]),
        logit_bias={draw.randrange(VOCAB): draw.uniform(-4, 4) for _ in range(3)},
        min_tokens=draw.choice([0, len(output) + 1, len(output) + 2]),
        max_tokens=40,
        stop_token_ids=[draw.randrange(VOCAB) for _ in range(3)],
        presence_penalty=draw.choice([0.0, 0.7]),
        frequency_penalty=draw.choice([0.0, 0.4]),
        repetition_penalty=draw.choice([1.0, 1.3]),
    )
    last = output[-1]
    return {
        "params": params,
        "prompt": [draw.randrange(VOCAB) for _ in range(5)],
        "output": output,
        "bad_words": [[draw.randrange(VOCAB)], [last, draw.randrange(VOCAB)], [0, 1], [1, 2], [2, 3]],
        "forbidden": torch.tensor([draw.random() < 0.2 for _ in range(VOCAB)]),
        "top_k": draw.choice([VOCAB, 5, 20]),
        "top_p": draw.choice([1.0, 0.9, 0.6]),
    }


def metadata(requests: list[dict]) -> SamplingMetadata:
    """As the runner builds it for a batch of these requests."""
    processors = LogitsProcessors(build(Limits, CPU, False) for build in BUILTIN_LOGITS_PROCESSORS)
    added = [(i, r["params"], r["prompt"], r["output"]) for i, r in enumerate(requests)]
    for processor in processors.all:
        processor.update_state(BatchUpdate(batch_size=len(requests), removed=[], moved=[], added=added))

    def column(name: str) -> torch.Tensor:
        return torch.tensor([getattr(r["params"], name) for r in requests])

    temperature = column("temperature")
    return SamplingMetadata(
        temperature=temperature,
        all_greedy=bool((temperature == 0).all()),
        all_random=bool((temperature > 0).all()),
        top_p=torch.tensor([r["top_p"] for r in requests]),
        top_k=torch.tensor([r["top_k"] for r in requests], dtype=torch.int32),
        generators={},
        max_num_logprobs=None,
        no_penalties=False,
        prompt_token_ids=torch.tensor([r["prompt"] for r in requests]),
        frequency_penalties=column("frequency_penalty"),
        presence_penalties=column("presence_penalty"),
        repetition_penalties=column("repetition_penalty"),
        output_token_ids=[r["output"] for r in requests],
        allowed_token_ids_mask=torch.stack([r["forbidden"] for r in requests]),
        bad_words_token_ids={i: r["bad_words"] for i, r in enumerate(requests)},
        logitsprocs=processors,
    )


def alone(row: torch.Tensor, one: dict, drafts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's sampler on one row: (after what can change an argmax, after temperature and limits)."""
    behind = {**one, "output": [*one["output"], *drafts]}
    sampling = metadata([behind])
    constrained = Sampler().apply_logits_processors(row[None].float().clone(), sampling, predict_bonus_token=False)
    shaped = Sampler.apply_temperature(constrained.clone(), sampling.temperature, sampling.all_random)
    for processor in sampling.logitsprocs.argmax_invariant:
        shaped = processor.apply(shaped)
    return constrained[0], apply_top_k_top_p(shaped, sampling.top_k, sampling.top_p)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [COUNTS, [2, 2, 2]], ids=["ragged", "even"])
@pytest.mark.parametrize("seed", range(6))
def test_every_row_as_the_sampler_without_drafts_would_have_it(seed: int, counts: list[int], dtype) -> None:
    draw = random.Random(1000 + seed)
    requests = [request(100 * seed + i) for i in range(len(counts))]
    drafts = [[draw.randrange(4) for _ in range(count)] for count in counts]
    flat = torch.tensor([t for row in drafts for t in row], dtype=torch.int32)
    batch = DraftBatch.of(flat, counts)
    logits = (torch.randn(len(flat) + len(counts), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)
    before, sampling = logits.clone(), metadata(requests)

    rows = constrain(logits, batch, counts, sampling)
    shaped = shape(rows, batch, sampling, torch.empty(rows.shape))

    assert torch.equal(logits, before), "raw logits must stay as they are"
    index = 0
    for one, own in zip(requests, drafts, strict=True):
        for j in range(len(own) + 1):
            constrained, limited = alone(logits[index], one, own[:j])
            torch.testing.assert_close(rows[index], constrained)
            torch.testing.assert_close(shaped[index], limited)
            index += 1


def test_a_placeholder_reaches_neither_penalties_nor_bad_words() -> None:
    """Rows before the placeholder are as ever; those behind it are never emitted and only must not break anything."""
    requests = [request(1), request(2)]
    batch = DraftBatch.of(torch.tensor([-1, -1, 3, -1], dtype=torch.int32), [2, 2])
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(3))
    rows = constrain(logits, batch, [2, 2], metadata(requests))
    for index, (one, own) in {0: (requests[0], []), 3: (requests[1], []), 4: (requests[1], [3])}.items():
        torch.testing.assert_close(rows[index], alone(logits[index], one, own)[0])


def test_every_processor_of_this_release_has_a_form() -> None:
    """Else `install` refuses to start the server."""
    assert set(BUILTIN_LOGITS_PROCESSORS) == set(WITH_FORM_FOR_DRAFTS)


def test_a_processor_without_a_form_for_drafts_is_refused() -> None:
    sampling = metadata([request(1)])
    sampling = replace(sampling, logitsprocs=LogitsProcessors())
    sampling.logitsprocs.non_argmax_invariant.append(object())
    batch = DraftBatch.of(torch.tensor([], dtype=torch.int32), [0])
    with pytest.raises(NotImplementedError, match="no form for drafts"):
        constrain(torch.zeros(1, VOCAB), batch, [0], sampling)
    sampling.logitsprocs.argmax_invariant.append(object())
    with pytest.raises(NotImplementedError, match="no form for drafts"):
        shape(torch.zeros(1, VOCAB), batch, sampling, torch.empty(1, VOCAB))
