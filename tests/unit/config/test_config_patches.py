"""mtp.patches: our parts inside vllm-ascend, each with a switch."""

from collections.abc import Callable

import pytest
from inventory_copy import Copy

from mtp_runtime.config import api
from mtp_runtime.config.problems import ConfigError
from mtp_runtime.config.schema import Patches
from mtp_runtime.patch_names import PATCH_NAMES, variable

MakeCopy = Callable[[str], Copy]
VARIABLE = "MTP_PATCHES"


def test_the_keys_are_the_names() -> None:
    assert tuple(Patches.model_fields) == PATCH_NAMES
    assert all(field.default is True for field in Patches.model_fields.values())


@pytest.mark.parametrize(
    ("off", "expected"),
    [
        ((), None),
        (("sampler",), "padding,graph_sizes,attention,placeholders"),
        (("attention", "padding"), "sampler,graph_sizes,placeholders"),
        (PATCH_NAMES, "none"),
    ],
)
def test_what_is_rendered(off: tuple[str, ...], expected: str | None, copy: MakeCopy) -> None:
    assert variable(off) == expected
    place = copy("a3")
    for written in (dict.fromkeys(off, False), {name: name not in off for name in PATCH_NAMES}):
        ranks = api.plan("a3", place.edit({"mtp.patches": written}).root)["ranks"]
        assert {rank["role"] for rank in ranks} == {"prefill", "decode"}
        assert {rank["env"].get(VARIABLE) for rank in ranks} == {expected}


@pytest.mark.parametrize("edits", [{"mtp.patches": None}, {"mtp.patches": {"sampler": False}, "mtp.enabled": False}])
def test_nothing_is_rendered_by_default_or_without_mtp(edits: dict[str, object], copy: MakeCopy) -> None:
    place = copy("a3").edit(edits)
    assert all(VARIABLE not in rank["env"] for rank in api.plan(place.name, place.root)["ranks"])


def refused(place: Copy) -> str:
    with pytest.raises(ConfigError) as found:
        api.plan(place.name, place.root)
    (problem,) = found.value.problems
    return f"{problem.rule} {problem.key}: {problem.message} {problem.remedy}"


def test_an_unknown_patch_is_refused_with_the_list_or_the_one_that_was_meant(copy: MakeCopy) -> None:
    place = copy("a3")
    told = refused(place.edit({"mtp.patches": {"scheduler_of_ours": False}}))
    assert told.startswith("C01 mtp.patches.scheduler_of_ours: ") and ", ".join(PATCH_NAMES) in told, told
    assert "did you mean sampler?" in refused(place.edit({"mtp.patches": {"smpler": False}}))


def test_only_true_and_false(copy: MakeCopy) -> None:
    assert refused(copy("a3").edit({"mtp.patches": {"sampler": 0}})).startswith("C02 mtp.patches.sampler: ")


@pytest.mark.parametrize("name", ["local", "seed-online"])
def test_a_line_without_patches_is_refused_with_the_line_that_has_them(name: str, copy: MakeCopy) -> None:
    told = refused(copy(name).edit({"mtp.patches": {"sampler": True}}))
    assert told.startswith("R46 mtp.patches: patches is no key of ") and "vllm-ascend 0.23.0" in told, told
