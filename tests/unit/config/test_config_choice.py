"""Which verification runs: the rule, its reasons, and that the configuration knows the same names."""

from typing import get_args

import pytest

from mtp_runtime import choice, releases
from mtp_runtime.config.schema import Mtp
from mtp_runtime.graphs.slots import PADDINGS


@pytest.mark.parametrize("k", range(1, 16))
@pytest.mark.parametrize("has_draft_probs", [False, True])
def test_auto_takes_block_where_it_can_gain(k: int, has_draft_probs: bool) -> None:
    found = choice.choose_method("auto", has_draft_probs, k)
    assert found.method == ("block" if has_draft_probs and k >= 2 else "tokenwise")
    assert found.why.startswith("auto: ")


@pytest.mark.parametrize("method", choice.METHODS)
def test_an_explicit_method_is_taken_and_says_when_it_cannot_pay(method: str) -> None:
    for has_draft_probs, k, pays in ((True, 2, True), (True, 1, False), (False, 2, False)):
        found = choice.choose_method(method, has_draft_probs, k)
        assert found.method == method
        assert ("gains nothing" in found.why) == (method == "block" and not pays)


def test_unknown_names_and_no_drafts_are_refused() -> None:
    with pytest.raises(ValueError, match="'typical' is unknown: use one of auto, tokenwise, block"):
        choice.choose_method("typical", True, 1)
    with pytest.raises(ValueError, match="K = 0"):
        choice.choose_method("auto", True, 0)


def test_the_configuration_offers_the_same_choices() -> None:
    assert get_args(Mtp.model_fields["verification"].annotation) == choice.CHOICES
    assert get_args(Mtp.model_fields["attention"].annotation) == choice.ATTENTIONS
    assert get_args(Mtp.model_fields["padding"].annotation) == ("auto", *PADDINGS)
    assert {name for release in releases.RELEASES for name in release.attention} == set(choice.ATTENTIONS)
    offered = set(get_args(Mtp.model_fields["draft_sampling"].annotation))
    assert offered == {choice.GREEDY, choice.PROBABILISTIC}
    assert offered == {name for release in releases.RELEASES for name in release.draft_sampling}
