"""The shipped weights meet every limit that their documentation states."""

import pytest

from mtp_runtime.model import export, heldout, quality
from mtp_runtime.model.recipe import Recipe

pytestmark = pytest.mark.engine


def test_the_shipped_weights_meet_every_limit() -> None:
    model, tokenizer = export.load(export.WEIGHTS)
    seen = heldout.training_ngrams(tokenizer, Recipe())
    prompts = heldout.prompts(tokenizer, quality.PROMPTS, seen)
    found, completions = quality.measure(model, tokenizer, prompts)
    print(found)
    assert found.failures() == []
    assert len(completions) >= 200 and min(len(p.ids) for p in prompts) >= 40
