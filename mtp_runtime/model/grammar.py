"""The probabilistic grammar that the tiny model is trained on: books of small towns.

The grammar is one coroutine, ``book``: it yields fixed text and weighted choices, and three drivers run it.
``generate`` picks the choices at random, ``score`` follows a given text and adds up the log-probabilities of the
choices it made, ``is_prefix`` tells whether a text can be continued to a book. One definition, so that what is
generated, what is scored and what counts as grammatical cannot drift apart.

It depends on context on purpose: the weather, the seller and the place of a day follow from those of the day before,
a sum must come out right, goods, trades and pronouns must agree. Greedy decoding can therefore not repeat itself
without leaving the language, and a model has to look back to be right.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial

from mtp_runtime.model import lexicon as lex


@dataclass(frozen=True)
class Choice:
    """One weighted choice: ``options`` are texts, none a prefix of another; ``weights`` are positive."""

    options: tuple[str, ...]
    weights: tuple[float, ...]

    def probability(self, index: int) -> float:
        return self.weights[index] / sum(self.weights)


Step = str | Choice
Grammar = Generator[Step, int, None]


@dataclass
class _Town:
    """What a book has said so far: the facts that later sentences must agree with."""

    name: str = ""
    days: int = 0
    last: dict[str, str] = field(default_factory=dict)  # weather, actor and place of the day before


def _pick(options: Sequence[str], weights: Sequence[float] | None = None) -> Generator[Step, int, str]:
    """Yield one choice and return the chosen text."""
    index = yield Choice(tuple(options), tuple(weights or [1.0] * len(options)))
    return options[index]


def _skewed(options: Sequence[str]) -> list[float]:
    """Falling weights: the first option is the likeliest, as words of a real text are."""
    return [1.0 / (rank + 1.5) for rank in range(len(options))]


def successors(ring: Sequence[str], value: str, steps: Sequence[int]) -> list[str]:
    """What may come after `value`: the members of the ring that many places further on."""
    at = ring.index(value)
    return [ring[(at + step) % len(ring)] for step in steps]


def _next(town: _Town, kind: str) -> Generator[Step, int, str]:
    """The day's weather, actor or place: anything on the first day, then a successor of the last one."""
    ring, steps = lex.RINGS[kind]
    last = town.last.get(kind)
    chosen = yield from _pick(ring if last is None else successors(ring, last, steps))
    town.last[kind] = chosen
    return chosen


def _day(town: _Town, number: int) -> Grammar:
    yield f"Day {number}. "
    yield from _next(town, "weather")
    yield f" {town.name}. "
    actor = yield from _next(town, "actor")
    trade = lex.TRADE_OF[actor]
    yield f" the {trade} "
    yield from _pick(lex.VERBS)
    yield " "
    amount = int((yield from _pick([str(n) for n in range(3, 10)])))
    yield " "
    goods = yield from _pick(lex.TRADES[trade], _skewed(lex.TRADES[trade]))
    yield " to "
    yield from _next(town, "place")
    yield ". "
    yield from _deal(actor, goods, amount)


def _deal(actor: str, goods: str, amount: int) -> Grammar:
    """One sale in one of three forms; the remainder is the difference, the pronoun is the actor's."""
    pronoun, object_ = ("she", "her") if actor in lex.SHE else ("he", "him")
    counts = [str(n) for n in range(1, amount)]
    buyers = successors(lex.NAMES, actor, lex.BUYER_STEPS)
    form = yield from _pick(lex.DEALS)
    if form == "Soon":
        yield " "
        buyer = yield from _pick(buyers)
        yield f" the {lex.TRADE_OF[buyer]} bought "
        sold = yield from _pick(counts)
        yield f" of the {goods}, so {amount - int(sold)} were left. "
    elif form == "There":
        yield f" {pronoun} sold "
        sold = yield from _pick(counts)
        yield f" of the {goods} to "
        buyer = yield from _pick(buyers)
        yield f" the {lex.TRADE_OF[buyer]} and kept {amount - int(sold)}. "
    else:
        yield f", {actor} kept "
        kept = yield from _pick(counts)
        yield f" of the {goods} and "
        buyer = yield from _pick(buyers)
        yield f" the {lex.TRADE_OF[buyer]} took {amount - int(kept)}. "
    yield f"{buyer} "
    yield from _pick(lex.CODAS, _skewed(lex.CODAS))
    yield f" {object_}.\n"


def book(chat: bool) -> Grammar:
    """The whole grammar: a header, its days, an ending. A chat book's header is the user's request."""
    town = _Town()
    yield "Write the book of " if chat else "The book of "
    town.name = yield from _pick(lex.TOWNS)
    yield " for "
    town.days = int((yield from _pick([str(n) for n in lex.DAYS])))
    # The request is longer than one block of the KV cache, so that prefill has something to hand over.
    yield f" days: {lex.REQUEST}{lex.TURN}" if chat else " days.\n"
    for number in range(1, town.days + 1):
        yield from _day(town, number)
    yield f"So ends the book of {town.name}."


def generate(seed: str, chat: bool) -> tuple[str, float]:
    """One book for a seed: its text and its log-probability in nats under the grammar."""
    rng = random.Random(seed)
    parts: list[str] = []
    logp = 0.0

    def choose(choice: Choice) -> int:
        nonlocal logp
        index = rng.choices(range(len(choice.options)), choice.weights)[0]
        logp += math.log(choice.probability(index))
        return index

    _drive(book(chat), choose, parts.append)
    return "".join(parts), logp


def _drive(grammar: Grammar, choose: Callable[[Choice], int], emit: Callable[[str], object]) -> None:
    """Run a grammar to its end: `choose` answers every choice, `emit` receives every piece of text."""
    answer: int | None = None
    while True:
        try:
            step = next(grammar) if answer is None else grammar.send(answer)
        except StopIteration:
            return
        answer = None
        if isinstance(step, Choice):
            answer = choose(step)
            step = step.options[answer]
        emit(step)


class _Follower:
    """Reads a given text along a grammar; raises _Stop at its end, at a clash, or when a word is cut in half."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.logp, self.partial = text, 0, 0.0, False

    def emit(self, piece: str) -> None:
        rest = self.text[self.at :]
        if not rest.startswith(piece):
            self.partial = piece.startswith(rest)
            raise _Stop
        self.at += len(piece)

    def choose(self, choice: Choice) -> int:
        rest = self.text[self.at :]
        hits = [i for i, option in enumerate(choice.options) if rest.startswith(option)]
        if not hits:
            self.partial = any(option.startswith(rest) for option in choice.options)
            raise _Stop
        index = max(hits, key=lambda i: len(choice.options[i]))
        self.logp += math.log(choice.probability(index))
        return index


class _Stop(Exception):
    """The text ended or left the grammar."""


def _follow(text: str, chat: bool) -> tuple[_Follower, bool]:
    reader = _Follower(text)
    try:
        _drive(partial(book, chat)(), reader.choose, reader.emit)
    except _Stop:
        return reader, False
    return reader, reader.at == len(text)


def score(text: str, chat: bool) -> float:
    """Log-probability of a whole book in nats; ValueError when `text` is not one (the message says where)."""
    reader, complete = _follow(text, chat)
    if not complete:
        raise ValueError(f"not a book: leaves the grammar at character {reader.at}: {text[reader.at :][:40]!r}")
    return reader.logp


def is_prefix(text: str, chat: bool) -> bool:
    """Whether `text` is a whole book or can be continued to one."""
    reader, complete = _follow(text, chat)
    return complete or reader.partial
