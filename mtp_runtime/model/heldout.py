"""Held-out prompts: the beginnings of books that training never saw, with no 20 tokens in a row that it did."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tokenizers import Tokenizer

from mtp_runtime.model import data
from mtp_runtime.model import tokenizer as tok
from mtp_runtime.model.lexicon import TURN
from mtp_runtime.model.recipe import Recipe

NGRAM = 20
SHORTEST, LONGEST = 40, 200


@dataclass(frozen=True)
class Prompt:
    """The first tokens of a held-out book; `ids` start with BOS."""

    index: int
    ids: tuple[int, ...]

    @property
    def chat(self) -> bool:
        return data.is_chat(self.index)


def ngrams(ids: Iterable[int], n: int) -> Iterator[tuple[int, ...]]:
    row = tuple(ids)
    return (row[i : i + n] for i in range(len(row) - n + 1))


def training_ngrams(tokenizer: Tokenizer, recipe: Recipe) -> set[int]:
    """Hashes of every run of NGRAM tokens that the training of `recipe` shows to the model."""
    seen: set[int] = set()
    for step in range(recipe.steps):
        stage, _, first = recipe.at(step)
        for index in range(first, first + stage.batch):
            ids = tok.encode_book(tokenizer, data.book_text("train", index)[0], data.is_chat(index))
            seen.update(map(hash, ngrams(ids[: stage.length], NGRAM)))
    return seen


def prompts(tokenizer: Tokenizer, count: int, seen: set[int] | None = None) -> list[Prompt]:
    """`count` prompts of 40 to 200 tokens, cut anywhere, none of which shares a run of NGRAM tokens with `seen`."""
    found: list[Prompt] = []
    index = 0
    while len(found) < count:
        ids = tok.encode_book(tokenizer, data.book_text("held-out", index)[0], data.is_chat(index))
        cut = tuple(ids[: random.Random(f"cut-{index}").randint(SHORTEST, LONGEST)])
        if not seen or not any(hash(g) in seen for g in ngrams(cut, NGRAM)):
            found.append(Prompt(index, cut))
        index += 1
    return found


def text(tokenizer: Tokenizer, ids: Iterable[int], chat: bool) -> tuple[str, bool]:
    """The grammar's text of token ids that begin a book, and whether EOS ended it; ValueError on a stray special."""
    row = list(ids)
    complete = tok.EOS_ID in row
    if complete:
        row = row[: row.index(tok.EOS_ID)]
    whole = tokenizer.decode(row, skip_special_tokens=False).replace(tok.BOS, "", 1)
    if chat:
        whole = whole.replace(tok.USER, "", 1).replace(tok.ASSISTANT, TURN, 1)
    stray = next((s for s in tok.SPECIAL if s in whole), None)
    if stray:
        raise ValueError(f"special token {stray} inside a book")
    return whole, complete
