"""Prompts of the graph tests: pieces of held-out books, so that drafts are accepted and rejected, of chosen lengths."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from engine_arms import MODEL
from tokenizers import Tokenizer

from mtp_runtime.model import prompts

SEATS = 16
"""max_num_seqs of the graph tests."""
CONTEXT = 243
"""max_model_len of the graph tests: after whole blocks there is room for 3 tokens, less than K + 1 at K = 3."""
TOKENS = 16
BURST_TOKENS = 8
LENGTHS = [17, 40, 1, 2, 3, 4, 5, 15, 16, 31, 32, 33, 48, 64, 7, 100, 1, 1, 2, 9, 1, 20, 1, 3]
"""Of 24 prompts: around K + 1 tokens and around a KV block of 16. Up to K + 1 tokens enter on the decode path."""
LIMITED = [CONTEXT - left for left in (17, 12, 7, 4, 3, 2, 1)]
"""Lengths of prompts near the longest context."""


@cache
def book(number: int) -> list[int]:
    """The tokens of a held-out book's beginning, long enough for any context."""
    tokenizer = Tokenizer.from_file(str(Path(MODEL) / "tokenizer.json"))
    tokens: list[int] = []
    while len(tokens) < CONTEXT:
        tokens += tokenizer.encode(prompts.completion(number)).ids
        number += 1000
    return tokens


def cut(number: int, length: int) -> list[int]:
    """`length` tokens of a book; few come from its middle, so that no two prompts are equal."""
    start = 40 + 3 * number if length < 8 else 0
    return book(number)[start : start + length]


def mixed() -> list[list[int]]:
    """24 prompts of mixed lengths: more than seats, so that the last ones join as others leave."""
    return [cut(number, length) for number, length in enumerate(LENGTHS)]


def answers_of() -> list[int]:
    """max_tokens of the 24, all different steps to leave in: inside a run of drafts too."""
    return [1 + (7 * number + 3) % TOKENS for number in range(len(LENGTHS))]


def single_tokens() -> list[list[int]]:
    """16 prompts of one token each, no two equal: the first decode step of a batch that P handed over together."""
    seen: list[list[int]] = []
    for token in book(60)[1:]:
        if [token] not in seen:
            seen.append([token])
    return seen[:SEATS]


def handed_over() -> list[list[int]]:
    """16 prompts of 16 m + 1 tokens: with the KV of whole blocks loaded, one token each is left to compute."""
    return [cut(100 + number, 16 * (1 + number % 4) + 1) for number in range(SEATS)]


def handed_over_late() -> list[list[int]]:
    """A prompt of whole blocks and one token that leaves two tokens of the context."""
    return [cut(130, CONTEXT - 2)]


def limited() -> list[list[int]]:
    """Prompts that reach the longest context within a few steps, and a short one among them."""
    return [cut(200 + number, length) for number, length in enumerate([*LIMITED, 40])]
