"""Release lines: what each renders, which keys it has, and that a line without a runtime is not deployed."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from inventory_copy import Copy
from pydantic import BaseModel

from mtp_runtime import releases
from mtp_runtime.config import api
from mtp_runtime.config.plan_checks import flag
from mtp_runtime.config.problems import ConfigError
from mtp_runtime.config.schema import Mtp, Serving

MakeCopy = Callable[[str], Copy]
ASCEND = [found for found in releases.RELEASES if found.engine == "vllm-ascend"]
OLD = [found for found in ASCEND if releases.TORCHAIR in found.graphs]


def spec(rank: dict[str, Any]) -> dict[str, Any]:
    """--speculative-config of a rank."""
    return dict(json.loads(flag(rank["argv"], "--speculative-config") or ""))


def on_line(found: releases.Release, copy: MakeCopy, edits: dict[str, Any] | None = None) -> Copy:
    """The one-node cluster that fits a line, on that line."""
    base = copy("seed-online" if found in OLD else "a3-single").edit({"topology.release": found.version})
    if found.schedulers == (releases.V0,):
        base.edit({"serving.additional_config.ascend_scheduler_config.enabled": True})
    if found.version == "0.18.0":
        base.edit({"serving.additional_config": None})
    return base.edit(edits or {})


@pytest.mark.parametrize(("found", "method"), [(r, m) for r in ASCEND for m in r.methods], ids=str)
def test_every_method_of_a_line_is_rendered(found: releases.Release, method: str, copy: MakeCopy) -> None:
    draft = "/mnt/weights/eagle" if method in releases.DRAFT_MODEL_METHODS else None
    edits = {"mtp.method": method, "mtp.num_speculative_tokens": 1, "mtp.draft_model": draft}
    place = on_line(found, copy, edits)
    expected: dict[str, Any] = {"num_speculative_tokens": 1, "method": method}
    if draft:
        expected |= {"model": draft, "draft_tensor_parallel_size": 1}
    assert [spec(rank) for rank in api.plan(place.name, place.root)["ranks"]] == [expected]


@pytest.mark.parametrize("found", ASCEND, ids=str)
def test_an_unknown_method_lists_those_of_the_line(found: releases.Release, copy: MakeCopy) -> None:
    place = on_line(found, copy, {"mtp.method": "mpt", "mtp.num_speculative_tokens": 1})
    with pytest.raises(ConfigError) as refused:
        api.plan(place.name, place.root)
    assert [p.rule for p in refused.value.problems] == ["R19"]
    assert refused.value.problems[0].message == f"unknown method 'mpt'; valid: {', '.join(found.methods)}."


@pytest.mark.parametrize("found", ASCEND, ids=str)
def test_the_plan_says_whether_a_line_is_deployed(found: releases.Release, copy: MakeCopy) -> None:
    place = on_line(found, copy, {"mtp.num_speculative_tokens": 1, "mtp.method": found.methods[-1]})
    plan = api.plan(place.name, place.root)
    assert plan["deployable"]["ok"] == (found.version == "0.23.0")
    if not plan["deployable"]["ok"]:
        for part in (f"{place.name}/group_vars/all/topology.yml: topology.release", found.line, "0.23.0"):
            assert part in plan["deployable"]["why"]
    assert plan["runner"] == "container"
    # Our plugin runs where this project has a runtime.
    assert ("MTP_VERIFICATION" in plan["ranks"][0]["env"]) == plan["deployable"]["ok"]


def test_cpu_lines_are_deployed_under_supervisor_or_in_containers() -> None:
    found = {name: api.plan(name) for name in ("local", "local-single", "lab")}
    assert all(plan["deployable"]["ok"] for plan in found.values())
    assert [plan["runner"] for plan in found.values()] == ["supervisor", "supervisor", "container"]


def keys(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """Dotted names of a type's fields."""
    for name, field in model.model_fields.items():
        yield f"{above}{name}"
        options = getattr(field.annotation, "__args__", (field.annotation,))
        for option in options:
            if isinstance(option, type) and issubclass(option, BaseModel):
                yield from keys(option, f"{above}{name}.")


def test_keys_and_lines_of_the_table_exist() -> None:
    known = {*keys(Serving), *Mtp.model_fields}
    assert set(releases.KEYS) <= known
    versions = {found.version for found in releases.RELEASES}
    assert len(versions) == len(releases.RELEASES)
    assert {version for lines in releases.KEYS.values() for version in lines} <= versions
    for key in known:
        # A key below another belongs to no line that lacks the one above.
        above = key.rpartition(".")[0]
        assert all(found.has(above) or not found.has(key) for found in releases.RELEASES if above)


@pytest.mark.parametrize(
    ("key", "lines"),
    [
        ("additional_config.torchair_graph_config.graph_batch_sizes", {"0.9.1", "0.11.0"}),
        ("additional_config.ascend_scheduler_config", {"0.9.1", "0.11.0"}),
        ("additional_config.enable_weight_nz_layout", {"0.9.1", "0.11.0"}),
        ("additional_config.torchair_graph_config.enable_multistream_shared_expert", {"0.11.0"}),
        ("disable_padded_drafter_batch", {"0.18.0", "0.23.0"}),
        ("compilation_config.cudagraph_capture_sizes", {"0.11.0", "0.18.0", "0.23.0"}),
        ("additional_config.finegrained_tp_config.lmhead_tensor_parallel_size", {"0.18.0", "0.23.0"}),
    ],
)
def test_which_tagged_lines_have_a_key(key: str, lines: set[str]) -> None:
    tagged = [found for found in ASCEND if not found.version.startswith("main")]
    assert {found.version for found in tagged if found.has(key)} == lines


def test_a_refused_key_names_the_lines_that_have_it(copy: MakeCopy) -> None:
    place = copy("a3-single").edit({"serving.additional_config.torchair_graph_config": {"graph_batch_sizes": [16]}})
    with pytest.raises(ConfigError) as refused:
        api.plan(place.name, place.root)
    (problem,) = refused.value.problems
    assert problem.key == "serving.additional_config.torchair_graph_config.graph_batch_sizes"
    assert problem.message == (
        "torchair_graph_config.graph_batch_sizes is no key of vllm-ascend 0.23.0; lines that have it: "
        "vllm-ascend 0.11.0, main-2025-09, main-2025-08, 0.9.1."
    )


def test_an_empty_group_of_another_line_is_refused_too(copy: MakeCopy) -> None:
    """It would be rendered."""
    place = copy("a3-single").edit({"serving.additional_config.torchair_graph_config": {}})
    with pytest.raises(ConfigError) as refused:
        api.plan(place.name, place.root)
    assert [p.key for p in refused.value.problems] == ["serving.additional_config.torchair_graph_config"]


def test_torchair_replaces_the_graph_flags(copy: MakeCopy) -> None:
    plan = api.plan("seed-online")
    assert plan["graphs"] == {"mode": "full", "slots": 16, "capture_sizes": [32]}
    assert "--compilation-config" not in plan["ranks"][0]["argv"]
    place = copy("seed-online").edit({"serving.graph_mode": "full"})
    assert api.plan(place.name, place.root)["ranks"] == plan["ranks"]


def test_one_process_starts_all_ranks_of_a_node(copy: MakeCopy) -> None:
    (rank,) = api.plan("a3-single")["ranks"]
    assert (flag(rank["argv"], "--data-parallel-size"), flag(rank["argv"], "--tensor-parallel-size")) == ("4", "4")
    assert not [word for word in rank["argv"] if word.startswith("--data-parallel-r")]
    place = copy("a3-single").edit({"topology.single.internal_dp": False, "topology.single.rpc_port": 12321})
    place.edit({"serving.router.port": 8090})
    ranks = api.plan(place.name, place.root)["ranks"]
    assert [flag(found["argv"], "--data-parallel-rank") for found in ranks] == ["0", "1", "2", "3"]
    assert [found["env"]["ASCEND_RT_VISIBLE_DEVICES"] for found in ranks][3] == "12,13,14,15"
