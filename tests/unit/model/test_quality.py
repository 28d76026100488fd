"""The measures themselves, and the shipped weights against their limits."""

import hashlib
import json

import pytest

torch = pytest.importorskip("torch", reason="needs the engine environment")

from mtp_runtime.model import data, export, heldout, quality  # noqa: E402
from mtp_runtime.model.recipe import Recipe, Stage  # noqa: E402

pytestmark = pytest.mark.engine


def test_repetition_measures():
    assert quality.distinct_4([1, 2, 3, 4, 5]) == 1.0
    assert quality.distinct_4([7] * 20) == pytest.approx(1 / 17)
    assert quality.most_repeated_8(list(range(30))) == 1
    assert quality.most_repeated_8([*range(8)] * 5) == 5


def test_failures_name_the_limit_and_the_value():
    bad = quality.Quality(1.3, 0.5, 0.6, 4, 0.97, 0.9, 2.0)
    assert len(bad.failures()) == 5
    assert "perplexity_ratio: 1.3, must be at most 1.25" in bad.failures()
    assert quality.Quality(1.1, 0.95, 0.8, 1, 0.85, 0.8, 2.9).failures() == []


def test_greedy_walk_counts_as_an_engine_does():
    """A text of which the drafter knows every second token: steps, drafts and acceptances by hand."""
    ids = list(range(10))
    best = torch.full((2, 10), -1)
    for place in (1, 3, 5):  # draft 0 at place p is for p + 2, draft 1 for p + 3
        best[0, place] = ids[place + 2]
    # place 1: hit then miss -> 2 tokens; place 3: the same; place 5: the same; place 7: one draft left, a miss
    assert quality.greedy_acceptance(best, 2, ids, 2) == (4, 7, 3)
    assert quality.greedy_acceptance(best, 2, ids, 1) == (4, 4, 3)


def test_heldout_prompts_share_no_20_tokens_with_training():
    _, tokenizer = export.load(export.WEIGHTS)
    seen = heldout.training_ngrams(tokenizer, Recipe(stages=(Stage(300, 4, 1024, 2, 1),)))
    chosen = heldout.prompts(tokenizer, 50, seen)
    assert min(len(p.ids) for p in chosen) >= 40
    assert not any(hash(g) in seen for p in chosen for g in heldout.ngrams(p.ids, heldout.NGRAM))
    train = data.book_text("train", 3)[0]
    assert any(hash(g) in seen for g in heldout.ngrams(tokenizer.encode(train).ids, heldout.NGRAM))


def test_the_manifest_matches_the_files():
    manifest = json.loads((export.WEIGHTS / export.MANIFEST).read_text())["files"]
    assert set(manifest) == {p.name for p in export.WEIGHTS.iterdir() if p.name != export.MANIFEST}
    for name, digest in manifest.items():
        assert hashlib.sha256((export.WEIGHTS / name).read_bytes()).hexdigest() == digest, name
