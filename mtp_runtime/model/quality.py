"""What the shipped weights must be able to do, measured without an engine.

Perplexity against the grammar's own, grammatical completions, variety, and how often the MTP layer's drafts would be
accepted. All of it by the float32 reference, whose logits agree with transformers' DeepseekV3ForCausalLM to 1e-4
(`tests/unit/model/test_reference.py`); an engine must reproduce it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from mtp_runtime.model import data, decode, grammar, heldout
from mtp_runtime.model import tokenizer as tok
from mtp_runtime.model.arch import rope_table
from mtp_runtime.model.limits import LIMITS, broken
from mtp_runtime.model.mtp_layer import DeepseekV3

PROMPTS = 200
NEW_TOKENS = 128


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
        return [text for name in LIMITS if (text := broken(name, measured[name]))]


@torch.inference_mode()
def on_books(model: DeepseekV3, tokenizer: Tokenizer, indices: Sequence[int]) -> tuple[float, float]:
    """Over whole held-out books: perplexity over the grammar's own, and the expected share of accepted drafts (K = 1).

    The books are samples of the grammar, so the second value is the acceptance of one-hot drafts at temperature 1.
    """
    excess = accepted = 0.0
    count = drafted = 0
    for index in indices:
        text, logp = data.book_text("held-out", index)
        ids = tok.encode_book(tokenizer, text, data.is_chat(index))
        best, p = drafts(model, ids, 1)
        following = torch.tensor(ids[1:])
        excess += logp - p[:-1].gather(1, following[:, None]).log().sum().item()
        places = torch.arange(len(ids) - 2)
        accepted += p[places + 1, best[0, places]].sum().item()
        count, drafted = count + len(following), drafted + len(places)
    return math.exp(excess / count), accepted / drafted


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


def measure(model: DeepseekV3, tokenizer: Tokenizer, prompts: Sequence[heldout.Prompt],
            progress: Any = iter) -> tuple[Quality, list[list[int]]]:  # fmt: skip
    """All of `Quality`, and the greedy completions it was measured on."""
    greedy = decode.complete(model, [p.ids for p in prompts], NEW_TOKENS, progress)
    rows: dict[int, list[tuple[int, int, int]]] = {1: [], 3: []}
    for prompt, completion in zip(prompts, greedy, strict=True):
        ids = [*prompt.ids, *completion]
        best, _ = drafts(model, ids, max(rows))
        for k, found in rows.items():
            found.append(greedy_acceptance(best, len(prompt.ids), ids, k))
    walks = {k: tuple(map(sum, zip(*found, strict=True))) for k, found in rows.items()}
    ratio, sampled = on_books(model, tokenizer, [p.index for p in prompts])
    quality = Quality(
        perplexity_ratio=ratio,
        parsed=sum(parses(tokenizer, p, c) for p, c in zip(prompts, greedy, strict=True)) / len(prompts),
        distinct_4=sum(map(distinct_4, greedy)) / len(greedy),
        most_repeated_8=max(map(most_repeated_8, greedy)),
        acceptance_k1_greedy=walks[1][2] / walks[1][1],
        acceptance_k1_sampled=sampled,
        acceptance_length_k3=1 + walks[3][2] / walks[3][0],
    )
    return quality, greedy
