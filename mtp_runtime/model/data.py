"""Training and held-out books by index: every book is a function of its seed, so nothing needs to be stored."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from torch import Tensor

from mtp_runtime.model import grammar
from mtp_runtime.model import tokenizer as tok
from mtp_runtime.model.lexicon import TURN

IGNORE = -100
TOKENIZER_BOOKS = 400


def is_chat(index: int) -> bool:
    """Every third book is a chat: the header is the user's request."""
    return index % 3 == 2


def book_text(split: str, index: int) -> tuple[str, float]:
    """Text of book `index` of a split ("train" or "held-out") and its log-probability in nats."""
    return grammar.generate(f"{split}-{index}", is_chat(index))


def train_tokenizer() -> Tokenizer:
    return tok.train(book_text("train", i)[0].replace(TURN, "\n") for i in range(TOKENIZER_BOOKS))


def batch(tokenizer: Tokenizer, first: int, size: int, length: int, depths: int) -> tuple[Tensor, Tensor]:
    """Training books first..first + size - 1, each from its beginning, at most `length` tokens of it.

    Returns tokens [size, T + depths], padded with EOS, and the mask of real tokens.
    """
    rows = []
    for index in range(first, first + size):
        rows.append(tok.encode_book(tokenizer, book_text("train", index)[0], is_chat(index))[:length])
    longest = max(map(len, rows)) + depths
    tokens = torch.full((size, longest), tok.EOS_ID)
    real = torch.zeros(size, longest, dtype=torch.bool)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = torch.tensor(ids)
        real[row, : len(ids)] = True
    return tokens, real
