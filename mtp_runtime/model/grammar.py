"""The probabilistic grammar that the tiny model is trained on: books of small towns.

The grammar is one coroutine, ``book``: it yields fixed text and weighted choices, and three drivers run it.
``generate`` picks the choices at random, ``score`` follows a given text and adds up the log-probabilities of the
choices it made, ``is_prefix`` tells whether a text can be continued to a book. One definition, so that what is
generated, what is scored and what counts as grammatical cannot drift apart.

It is context-dependent on purpose: nobody acts twice within three days, a place rests for three days, a sum must come
out right, a trade must be the one the header gave. Greedy decoding can therefore not fall into a loop without
leaving the language, and a model has to look back to be right.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator
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
    people: list[tuple[str, str]] = field(default_factory=list)  # (name, trade)
    recent: dict[str, list[str]] = field(default_factory=dict)

    def rest(self, kind: str, value: str, length: int) -> None:
        """Keep `value` out of the choices of `kind` until `length` more were made."""
        kept = self.recent.setdefault(kind, [])
        kept.append(value)
        del kept[:-length]

    def open(self, kind: str, values: list[str]) -> list[str]:
        return [v for v in values if v not in self.recent.get(kind, [])]


def _pick(options: list[str], weights: list[float] | None = None) -> Generator[Step, int, str]:
    """Yield one choice and return the chosen text."""
    index = yield Choice(tuple(options), tuple(weights or [1.0] * len(options)))
    return options[index]


def _skewed(options: list[str]) -> list[float]:
    """Falling weights: the first option is the likeliest, as words of a real text are."""
    return [1.0 / (rank + 1.5) for rank in range(len(options))]


def _header(town: _Town, chat: bool) -> Grammar:
    town.name = yield from _pick(list(lex.TOWNS))
    yield " for "
    town.days = int((yield from _pick([str(n) for n in lex.DAYS])))
    yield " days" + (" with" if chat else ". In it live")
    names, trades = list(lex.NAMES), list(lex.TRADES)
    for position in range(lex.PEOPLE):
        yield " and " if position == lex.PEOPLE - 1 else (" " if position == 0 else ", ")
        name = yield from _pick(names)
        names.remove(name)
        yield " the "
        trade = yield from _pick(trades)
        trades.remove(trade)
        town.people.append((name, trade))
    yield "." if chat else ".\n"


def _weather(town: _Town) -> Grammar:
    options = town.open("weather", list(lex.WEATHER))
    chosen = yield from _pick(options, _skewed(options))
    town.rest("weather", chosen, 2)
    yield f" {town.name}. "


def _day(town: _Town, number: int) -> Grammar:
    yield f"Day {number}. "
    yield from _weather(town)
    trades = dict(town.people)

    actor = yield from _pick(town.open("actor", [name for name, _ in town.people]))
    town.rest("actor", actor, 2)
    yield f" the {trades[actor]} "
    verb = yield from _pick(town.open("verb", list(lex.VERBS)))
    town.rest("verb", verb, 1)
    yield " "
    amount = int((yield from _pick([str(n) for n in range(3, 10)])))
    yield " "
    options = town.open("goods", list(lex.TRADES[trades[actor]]))
    goods = yield from _pick(options, _skewed(options))
    town.rest("goods", goods, 8)
    yield " to "
    place = yield from _pick(town.open("place", list(lex.PLACES)))
    town.rest("place", place, 3)
    yield ". "

    buyers = [name for name, _ in town.people if name != actor]
    form = yield from _pick(town.open("deal", list(lex.DEALS)))
    town.rest("deal", form, 1)
    yield from _deal(form, actor, goods, amount, buyers, trades)


def _deal(
    form: str, actor: str, goods: str, amount: int, buyers: list[str], trades: dict[str, str]
) -> Grammar:
    """One sale in one of three forms; the remainder is the difference, the pronoun is the actor's."""
    pronoun, object_ = ("she", "her") if actor in lex.SHE else ("he", "him")
    counts = [str(n) for n in range(1, amount)]
    if form == "Soon":
        yield " "
        buyer = yield from _pick(buyers)
        yield f" the {trades[buyer]} bought "
        sold = yield from _pick(counts)
        yield f" of the {goods}, so {amount - int(sold)} were left. "
    elif form == "There":
        yield f" {pronoun} sold "
        sold = yield from _pick(counts)
        yield f" of the {goods} to "
        buyer = yield from _pick(buyers)
        yield f" the {trades[buyer]} and kept {amount - int(sold)}. "
    else:
        yield f", {actor} kept "
        kept = yield from _pick(counts)
        yield f" of the {goods} and "
        buyer = yield from _pick(buyers)
        yield f" the {trades[buyer]} took {amount - int(kept)}. "
    yield f"{buyer} "
    options = list(lex.CODAS)
    yield from _pick(options, _skewed(options))
    yield f" {object_}.\n"


def book(chat: bool) -> Grammar:
    """The whole grammar: a header, its days, an ending. A chat book's header is the user's request."""
    town = _Town()
    yield "Write the book of " if chat else "The book of "
    yield from _header(town, chat)
    if chat:
        yield lex.TURN
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


def parsed_length(text: str, chat: bool) -> int:
    """How many leading characters of `text` the grammar accepts (all of them when `is_prefix`)."""
    reader, complete = _follow(text, chat)
    return len(text) if complete or reader.partial else reader.at
