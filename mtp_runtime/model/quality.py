"""What the shipped weights must be able to do, measured without an engine.

Perplexity against the grammar's own, grammatical completions, variety, and how often the MTP layer's drafts would be
accepted. Completions come from transformers' own DeepseekV3ForCausalLM, acceptance from the float32 reference of
`mtp_layer`: an engine must reproduce both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from mtp_runtime.model import data, grammar, heldout
from mtp_runtime.model import tokenizer as tok
from mtp_runtime.model.arch import rope_table
from mtp_runtime.model.mtp_layer import DeepseekV3

PROMPTS = 200
NEW_TOKENS = 128
BATCH = 100  # prompts that transformers completes at a time


@dataclass(frozen=True)
class Quality:
    """Measured values. Rates are shares of 1; acceptance length is in tokens a step."""

    perplexity_ratio: float
    parsed: float
    distinct_4: float
    most_repeated_8: int
    acceptance_k1_greedy: float
    acceptance_k1_sampled: float
    acceptance_length_k3: float

    def failures(self) -> list[str]:
        """Every limit that is not met, as text; empty when the model is good enough."""
        measured = asdict(self)
        return [
            f"{name}: {measured[name]:.4g}, must be {text}"
            for name, (text, met) in LIMITS.items()
            if not met(measured[name])
        ]


LIMITS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "perplexity_ratio": ("at most 1.25", lambda x: x <= 1.25),
    "parsed": ("at least 0.9", lambda x: x >= 0.9),
    "distinct_4": ("at least 0.5", lambda x: x >= 0.5),
    "most_repeated_8": ("at most 3", lambda x: x <= 3),
    "acceptance_k1_greedy": ("0.75 to 0.95", lambda x: 0.75 <= x <= 0.95),
    "acceptance_length_k3": ("at least 2.6", lambda x: x >= 2.6),
}
"""What each value must be, in words and as a check; values without a limit are reported only."""


@torch.inference_mode()
def perplexity_ratio(model: DeepseekV3, tokenizer: Tokenizer, indices: Sequence[int]) -> float:
    """exp of the nats a token that the model needs beyond the grammar, over whole held-out books."""
    model_nats = grammar_nats = 0.0
    count = 0
    for index in indices:
        text, logp = data.book_text("held-out", index)
        ids = torch.tensor([tok.encode_book(tokenizer, text, data.is_chat(index))])
        logits = model.lm_head(model.hidden(ids[:, :-1], rope_table(model.c, ids.shape[1] - 1)))
        model_nats += torch.nn.functional.cross_entropy(logits[0], ids[0, 1:], reduction="sum").item()
        grammar_nats -= logp
        count += ids.shape[1] - 1
    return math.exp((model_nats - grammar_nats) / count)


def parses(tokenizer: Tokenizer, prompt: heldout.Prompt, completion: Sequence[int]) -> bool:
    """Whether prompt and completion begin a book, and are a whole one where the model said that they are."""
    try:
        text, complete = heldout.text(tokenizer, [*prompt.ids, *completion], prompt.chat)
        if complete:
            grammar.score(text, prompt.chat)
    except ValueError:
        return False
    return grammar.is_prefix(text, prompt.chat)


def distinct_4(completion: Sequence[int]) -> float:
    grams = list(heldout.ngrams(completion, 4))
    return len(set(grams)) / len(grams) if grams else 1.0


def most_repeated_8(completion: Sequence[int]) -> int:
    return max(Counter(heldout.ngrams(completion, 8)).values(), default=0)


@torch.inference_mode()
def complete(folder: Path, prompts: Sequence[heldout.Prompt], sampled: bool, progress: Any = iter) -> list[list[int]]:
    """Completions by transformers, up to NEW_TOKENS tokens each and cut after EOS; sampled ones at temperature 1."""
    from transformers import DeepseekV3ForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # it reports the MTP layer, which it does not use, as unexpected
    model = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(0)
    results: dict[int, list[int]] = {}
    groups = [range(i, min(i + BATCH, len(prompts))) for i in range(0, len(prompts), BATCH)]
    for group in progress(groups):
        longest = max(len(prompts[i].ids) for i in group)
        ids = torch.full((len(group), longest), tok.EOS_ID)
        mask = torch.zeros_like(ids)
        for row, i in enumerate(group):  # padded on the left, as generation needs
            ids[row, longest - len(prompts[i].ids) :] = torch.tensor(prompts[i].ids)
            mask[row, longest - len(prompts[i].ids) :] = 1
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=sampled, temperature=1.0, top_k=0, top_p=1.0,
            pad_token_id=tok.EOS_ID,
        )  # fmt: skip
        for row, i in enumerate(group):
            new = out[row, longest:].tolist()
            results[i] = new[: new.index(tok.EOS_ID) + 1] if tok.EOS_ID in new else new
    return [results[i] for i in range(len(prompts))]


@torch.inference_mode()
def drafts(model: DeepseekV3, ids: Sequence[int], depths: int) -> tuple[Tensor, Tensor]:
    """What the MTP layer would draft along a text, and what the main model thinks of it.

    Returns draft tokens [depths, T] (draft k at place j is for position j + 2 + k, meaningful for j + k < T - 2 - k)
    and the main model's next-token probabilities [T, vocabulary]. After a first wrong draft the deeper ones of a place
    differ from an engine's, which feeds on its own draft; acceptance ends there anyway.
    """
    tokens = torch.tensor([list(ids)])
    rope = rope_table(model.c, tokens.shape[1])
    hidden = model.hidden(tokens, rope)
    embedded = model.model.embed_tokens(tokens.roll(-1, 1))
    outputs = model.mtp.unroll(hidden, embedded, rope, depths)
    best = [model.mtp_logits(x)[0].argmax(-1).roll(-depth) for depth, x in enumerate(outputs)]
    return torch.stack(best), model.lm_head(hidden)[0].softmax(-1)


def greedy_acceptance(best: Tensor, prompt: int, ids: Sequence[int], k: int) -> tuple[int, int, int]:
    """Walk a greedy text (prompt of `prompt` tokens, then completion) as an engine with K = k does.

    best: draft tokens as `drafts` returns them, at least k depths. Returns (steps, drafts, accepted); only drafts for
    tokens that the text holds count.
    """
    steps = drafted = accepted = 0
    place = prompt - 1  # h at the last prompt token and the first emitted token give the first draft
    while place + 2 < len(ids):
        width = min(k, len(ids) - place - 2)
        hits = 0
        while hits < width and best[hits, place] == ids[place + 2 + hits]:
            hits += 1
        steps, drafted, accepted = steps + 1, drafted + width, accepted + hits
        place += 1 + hits
    return steps, drafted, accepted


def sampled_acceptance(model: DeepseekV3, prompt: int, ids: Sequence[int]) -> tuple[float, int]:
    """Expected acceptances (sum of p(draft)) and places of a text sampled at temperature 1, K = 1, one-hot drafts."""
    best, p = drafts(model, ids, 1)
    places = torch.arange(prompt - 1, len(ids) - 2)
    return p[places + 1, best[0, places]].sum().item(), len(places)


def measure(folder: Path, model: DeepseekV3, tokenizer: Tokenizer, prompts: Sequence[heldout.Prompt],
            progress: Any = iter) -> tuple[Quality, list[list[int]]]:  # fmt: skip
    """All of `Quality` for the weights in `folder`, and the greedy completions it was measured on."""
    greedy = complete(folder, prompts, sampled=False, progress=progress)
    sampled = complete(folder, prompts[: len(prompts) // 2], sampled=True, progress=progress)
    rows: dict[int, list[tuple[int, int, int]]] = {1: [], 3: []}
    for prompt, completion in zip(prompts, greedy, strict=True):
        ids = [*prompt.ids, *completion]
        best, _ = drafts(model, ids, max(rows))
        for k, found in rows.items():
            found.append(greedy_acceptance(best, len(prompt.ids), ids, k))
    walks = {k: tuple(map(sum, zip(*found, strict=True))) for k, found in rows.items()}
    chances = [sampled_acceptance(model, len(p.ids), [*p.ids, *c]) for p, c in zip(prompts, sampled, strict=False)]
    quality = Quality(
        perplexity_ratio=perplexity_ratio(model, tokenizer, [p.index for p in prompts]),
        parsed=sum(parses(tokenizer, p, c) for p, c in zip(prompts, greedy, strict=True)) / len(prompts),
        distinct_4=sum(map(distinct_4, greedy)) / len(greedy),
        most_repeated_8=max(map(most_repeated_8, greedy)),
        acceptance_k1_greedy=walks[1][2] / walks[1][1],
        acceptance_k1_sampled=sum(c for c, _ in chances) / sum(n for _, n in chances),
        acceptance_length_k3=1 + walks[3][2] / walks[3][0],
    )
    return quality, greedy
