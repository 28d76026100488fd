"""A short training run lowers every loss; a resumed run is the same run; batches and masks are right."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="needs the engine environment")

from mtp_runtime.model import data, optim  # noqa: E402
from mtp_runtime.model.arch import Config, rope_table  # noqa: E402
from mtp_runtime.model.mtp_layer import DeepseekV3, grow, initialise  # noqa: E402
from mtp_runtime.model.recipe import Recipe, Stage  # noqa: E402
from mtp_runtime.model.train import Trainer  # noqa: E402

pytestmark = pytest.mark.engine

SMALL = Config(vocab_size=905)
STAGES = (
    Stage(steps=8, layers=2, length=160, batch=2, depths=1),
    Stage(steps=6, layers=4, length=1024, batch=1, depths=3),
)
RECIPE = Recipe(stages=STAGES, warmup=4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A straight run, and one that is stopped and resumed in each of its two stages."""
    straight = Trainer(tmp_path_factory.mktemp("straight"), RECIPE, SMALL)
    while straight.step < RECIPE.steps:
        straight.train_step()
    folder = tmp_path_factory.mktemp("resumed")
    for stop in (5, 9, RECIPE.steps):
        resumed = Trainer(folder, RECIPE, SMALL)
        assert resumed.resume() == (stop > 5)
        while resumed.step < stop:
            resumed.train_step()
        resumed.save()
    return straight, resumed


def test_a_short_run_lowers_every_loss(runs):
    first, last = runs[0].log[0], runs[0].log[-1]
    for name in ("main", "mtp1"):
        assert last[name] < first[name] - 0.5, name


def test_a_resumed_run_is_the_same_run(runs):
    straight, resumed = runs
    for name, tensor in straight.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    assert [r["main"] for r in straight.log] == [r["main"] for r in resumed.log]


def test_another_recipe_cannot_resume_a_checkpoint(runs):
    folder = runs[1].folder
    with pytest.raises(ValueError, match="another recipe"):
        Trainer(folder, Recipe(stages=STAGES, warmup=5), SMALL).resume()


def test_a_grown_model_computes_what_the_small_one_did():
    small = DeepseekV3(replace(SMALL, num_hidden_layers=2))
    initialise(small, 3)
    large = grow(small, replace(SMALL, num_hidden_layers=6), 4)
    tokens = torch.randint(0, 905, (1, 50))
    rope = rope_table(SMALL, 50)
    with torch.inference_mode():
        assert torch.equal(small.hidden(tokens, rope), large.hidden(tokens, rope))
    with pytest.raises(ValueError, match="not a multiple"):
        grow(small, replace(SMALL, num_hidden_layers=5), 4)


def test_stages_use_every_book_once():
    used = []
    for step in range(RECIPE.steps):
        stage, _, book = RECIPE.at(step)
        used += range(book, book + stage.batch)
    assert used == list(range(RECIPE.books)) and RECIPE.at(8)[0].layers == 4


def test_books_are_at_least_512_tokens_and_padding_is_masked(runs):
    tokens, real = data.batch(runs[0].tokenizer, first=12, size=4, length=1024, depths=3)
    assert real.sum(1).min() >= 512
    assert (tokens[~real] == 1).all() and not real[:, -3:].any()


def test_newton_schulz_brings_singular_values_near_one():
    torch.manual_seed(0)
    for shape in ((3, 64, 128), (2, 192, 64)):
        values = torch.linalg.svdvals(optim.orthogonalise(torch.randn(shape)))
        assert values.min() > 0.3 and values.max() < 1.3
