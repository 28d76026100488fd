"""The grammar has one derivation a text, scores what it generates, and refuses what it does not."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_runtime.model import grammar
from mtp_runtime.model import lexicon as lex

LISTS = [lex.NAMES, lex.TOWNS, lex.PLACES, lex.WEATHER, lex.VERBS, lex.DEALS, lex.CODAS, tuple(lex.TRADES)]


@pytest.mark.parametrize("options", [*LISTS, *lex.TRADES.values()], ids=lambda o: o[0])
def test_no_option_is_a_prefix_of_another(options):
    clashes = [(a, b) for a, b in itertools.permutations(options, 2) if b.startswith(a)]
    assert clashes == []


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_a_generated_book_scores_as_it_was_drawn(seed, chat):
    text, logp = grammar.generate(f"test-{seed}", chat)
    assert grammar.score(text, chat) == pytest.approx(logp, abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.floats(0, 1))
def test_every_cut_of_a_book_is_a_prefix_and_a_wrong_tail_is_not(seed, chat, share):
    text, _ = grammar.generate(f"test-{seed}", chat)
    cut = text[: int(share * len(text))]
    assert grammar.is_prefix(cut, chat)
    assert not grammar.is_prefix(cut + "~", chat)


def test_sums_come_out_right_in_every_sale():
    text, _ = grammar.generate("sums", False)
    sums = 0
    for line in text.splitlines()[1:-1]:
        amount, first, rest = (int(n) for n in re.findall(r"\d+", line)[1:])
        assert first + rest == amount, line
        sums += 1
    assert sums >= 14


@pytest.mark.parametrize("old, new", [(" were left", " was left"), ("Day 3.", "Day 4."), (" the ", " a ")])
def test_a_changed_book_is_refused_with_its_place(old, new):
    text, _ = grammar.generate("changed-2", False)
    if old not in text:
        text = next(t for i in range(50) if old in (t := grammar.generate(f"changed-{i}", False)[0]))
    with pytest.raises(ValueError, match="leaves the grammar at character"):
        grammar.score(text.replace(old, new, 1), False)
    assert not grammar.is_prefix(text.replace(old, new, 1), False)


def test_a_day_follows_from_the_day_before():
    text, _ = grammar.generate("actors", False)
    actors = [line.split(". ")[2].split(" the ")[0] for line in text.splitlines()[1:-1]]
    steps = {(lex.NAMES.index(b) - lex.NAMES.index(a)) % len(lex.NAMES) for a, b in itertools.pairwise(actors)}
    assert len(actors) >= 14 and steps <= set(lex.RINGS["actor"][1])
    swapped = text.replace(actors[3], actors[2], 1)
    assert not grammar.is_prefix(swapped, False)
