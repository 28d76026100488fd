"""Held-out prompts as text, for everything that talks to a running stack: canary, load test, live tests.

Pure Python, so that the control environment can use it; the same books as `heldout`, cut between words.
"""

from __future__ import annotations

import random
import re

from mtp_runtime.model import grammar
from mtp_runtime.model.lexicon import TURN

# Indices far from those that `heldout` measures on, and of the kind that `data.is_chat` gives to each split.
FIRST = 30_000
SHORTEST_WORDS, LONGEST_WORDS = 18, 120  # 18 words are more than one block of 16 tokens


def completion(number: int) -> str:
    """The beginning of a held-out book, 18 to 120 words of it, by number."""
    text, _ = grammar.generate(f"held-out-{FIRST + 3 * number}", False)
    words = random.Random(f"words-{number}").randint(SHORTEST_WORDS, LONGEST_WORDS)
    cut = list(re.finditer(r"\S+", text))[words - 1].end()
    return text[:cut]


def chat(number: int) -> str:
    """A user's request for a book, by number."""
    text, _ = grammar.generate(f"held-out-{FIRST + 2 + 3 * number}", True)
    return text.split(TURN)[0]
