"""The local plans: what each process is started with, and how MTP changes it."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inventory_copy import Copy
from ruamel.yaml import YAML

from mtp_runtime.config import api, checks, placement, rules
from mtp_runtime.config.edit import set_k, with_k
from mtp_runtime.config.plan_checks import flag
from mtp_runtime.config.render import render, url
from mtp_runtime.config.schema import Cluster

MakeCopy = Callable[[str], Copy]
PLAN = api.plan("local")
# What --speculative-config of every CPU rank has beside K: the drafter does not inherit --attention-backend.
CPU_DRAFTER = {"method": "mtp", "attention_backend": "CPU_MLA"}


def spec(rank: dict[str, Any]) -> dict[str, Any] | None:
    """--speculative-config of a rank."""
    text = flag(rank["argv"], "--speculative-config")
    return None if text is None else dict(json.loads(text))


def test_local_is_one_prefill_and_one_decode_rank() -> None:
    assert [(r["name"], r["role"], r["host"], r["port"]) for r in PLAN["ranks"]] == [
        ("prefill-0", "prefill", "localhost", 8200),
        ("decode-0", "decode", "localhost", 8300),
    ]
    for rank in PLAN["ranks"]:
        argv = rank["argv"]
        assert argv[:3] == ["{engine_python}", "-m", "vllm.entrypoints.openai.api_server"]
        assert flag(argv, "--host") == "127.0.0.1"
        assert flag(argv, "--dtype") == "float32"
        assert ("--enforce-eager" in argv) == (rank["role"] == "prefill")
        # Our plugin takes the place of this backend only; a machine with AMX would choose another.
        assert flag(argv, "--attention-backend") == "CPU_MLA"
        transfer = json.loads(flag(argv, "--kv-transfer-config") or "")
        assert transfer == {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
        assert rank["env"]["UCX_TLS"] == "tcp,sm,self"
        assert rank["env"]["OMP_NUM_THREADS"] == "1"
        assert rank["env"]["VLLM_PLUGINS"] == "mtp_runtime"
    ports = [rank["env"]["VLLM_NIXL_SIDE_CHANNEL_PORT"] for rank in PLAN["ranks"]]
    assert ports == ["8250", "8350"]


def test_no_secret_and_no_machine_path_in_a_plan() -> None:
    text = json.dumps(PLAN)
    assert str(api.repository()) not in text
    assert "api-key" not in text.lower()
    assert "api_key" not in text.lower()


def test_kv_cache_holds_every_slot_at_full_context_and_fits() -> None:
    sizes = {r["role"]: int(flag(r["argv"], "--kv-cache-memory-bytes") or 0) for r in PLAN["ranks"]}
    per_token = (api.load_checked("local").model.num_hidden_layers or 0) + 1
    per_token *= 576 * 4
    assert sizes["decode"] >= 4 * (8192 + 1) * per_token
    assert sizes["prefill"] >= 2 * (8192 + 1) * per_token
    # The engines take about 1.2 GB each beside the cache; 8 GB must hold the whole stack.
    assert sum(sizes.values()) <= 3 * 10**9


def test_single_has_no_hand_over() -> None:
    plan = api.plan("local-single")
    (rank,) = plan["ranks"]
    assert (rank["role"], rank["port"]) == ("single", 8310)
    assert "--kv-transfer-config" not in rank["argv"]
    assert not [key for key in rank["env"] if "NIXL" in key]
    argv = plan["router"]["argv"]
    assert flag(argv, "--worker-urls") == "http://127.0.0.1:8310"
    assert "--vllm-pd-disaggregation" not in argv


def test_local_and_local_single_can_run_side_by_side() -> None:
    taken = {(found["address"], found["port"]) for found in PLAN["listeners"]}
    others = {(found["address"], found["port"]) for found in api.plan("local-single")["listeners"]}
    assert len(taken) == 9
    assert not taken & others


@pytest.mark.parametrize("k", range(16))
def test_k_reaches_decode_only(k: int, copy: MakeCopy) -> None:
    found = copy("local")
    set_k("local", k, found.root)
    plan = api.plan("local", found.root)
    prefill, decode = plan["ranks"]
    if k == 0:
        assert (spec(prefill), spec(decode)) == (None, None)
        assert plan["mtp"]["k"] == prefill["k"] == decode["k"] == 0
    else:
        assert spec(prefill) == {"num_speculative_tokens": 1, **CPU_DRAFTER}
        assert spec(decode) == {"num_speculative_tokens": k, **CPU_DRAFTER}
        assert (plan["mtp"]["k"], prefill["k"], decode["k"]) == (k, 1, k)


def test_changing_k_leaves_the_prefill_rank_alone(copy: MakeCopy) -> None:
    """`make mtp` restarts what changed: from K = 1 to 3 that is decode only."""
    found = copy("local")
    set_k("local", 3, found.root)
    before, after = PLAN["ranks"], api.plan("local", found.root)["ranks"]
    assert before[0] == after[0]
    assert before[1] != after[1]


def test_verification_reaches_every_rank(copy: MakeCopy) -> None:
    found = copy("local").edit({"mtp.verification": "tokenwise"})
    assert {r["env"]["MTP_VERIFICATION"] for r in api.plan("local", found.root)["ranks"]} == {"tokenwise"}


def test_probabilistic_drafts_reach_decode_only(copy: MakeCopy) -> None:
    found = copy("local").edit({"mtp.draft_sampling": "probabilistic", "mtp.num_speculative_tokens": 3})
    prefill, decode = api.plan("local", found.root)["ranks"]
    assert prefill == PLAN["ranks"][0], "P must not restart for it"
    assert spec(decode) == {"num_speculative_tokens": 3, "draft_sample_method": "probabilistic", **CPU_DRAFTER}
    single = copy("local-single").edit({"mtp.draft_sampling": "probabilistic"})
    (rank,) = api.plan("local-single", single.root)["ranks"]
    assert (spec(rank) or {})["draft_sample_method"] == "probabilistic"


@pytest.mark.parametrize(
    ("edits", "method"),
    [
        ({}, "tokenwise"),
        ({"mtp.draft_sampling": "probabilistic"}, "tokenwise"),
        ({"mtp.draft_sampling": "probabilistic", "mtp.num_speculative_tokens": 2}, "block"),
        ({"mtp.num_speculative_tokens": 2}, "tokenwise"),
        ({"mtp.verification": "block"}, "block"),
        ({"mtp.enabled": False}, None),
    ],
)
def test_plan_says_which_verification_runs(edits: dict[str, Any], method: str | None, copy: MakeCopy) -> None:
    found = api.plan("local", copy("local").edit(edits).root)["verification"]
    assert found["method"] == method
    assert found["why"]


def test_attention_reaches_every_rank_and_padding_those_that_decode(copy: MakeCopy) -> None:
    assert [r["env"].get("MTP_ATTENTION") for r in PLAN["ranks"]] == [None, "tnd"]
    assert [r["env"].get("MTP_PADDING") for r in PLAN["ranks"]] == [None, "placeholder"]
    edits = {"mtp.attention": "batch_expansion", "mtp.padding": "slack"}
    ranks = api.plan("local", copy("local").edit(edits).root)["ranks"]
    assert [r["env"].get("MTP_ATTENTION") for r in ranks] == [None, "batch_expansion"]
    assert [r["env"].get("MTP_PADDING") for r in ranks] == [None, "slack"]
    (single,) = api.plan("local-single", copy("local-single").edit(edits).root)["ranks"]
    assert (single["env"]["MTP_ATTENTION"], single["env"]["MTP_PADDING"]) == ("batch_expansion", "slack")
    a3 = {(r["role"], r["env"].get("MTP_ATTENTION"), r["env"].get("MTP_PADDING")) for r in api.plan("a3")["ranks"]}
    assert a3 == {("prefill", None, None), ("decode", None, "placeholder")}
    other = copy("a3").edit({"topology.release": "0.18.0"}).root
    assert not [rank for rank in api.plan("a3", other)["ranks"] if "MTP_PADDING" in rank["env"]]


@pytest.mark.parametrize(
    ("base", "edits", "method", "why"),
    [
        ("local", {}, "placeholder", "auto: a request lives for"),
        ("local", {"serving.decode.graph_mode": "full"}, "placeholder", "auto: a request lives for"),
        ("local", {"mtp.num_speculative_tokens": 15}, "placeholder", "auto: K = 15: no "),
        ("local", {"mtp.padding": "slack"}, "slack", "asked for by mtp.padding"),
        ("local", {"mtp.enabled": False, "mtp.padding": "slack"}, None, "MTP is off"),
        ("a3", {}, "placeholder", "asked for by mtp.padding"),
        ("a3", {"mtp.padding": "auto"}, "placeholder", "auto: recompute_scheduler_enable"),
        (
            "a3",
            {"mtp.padding": "auto", "serving.decode.additional_config.recompute_scheduler_enable": None},
            None,
            "auto: left to the engine",
        ),
    ],
)
def test_plan_says_which_padding_and_why(
    base: str, edits: dict[str, Any], method: str | None, why: str, copy: MakeCopy
) -> None:
    found = api.plan(base, copy(base).edit(edits).root)["padding"]
    assert found["method"] == method
    assert found["why"].startswith(why)


def compilation(rank: dict[str, Any]) -> dict[str, Any] | None:
    """--compilation-config of a rank."""
    text = flag(rank["argv"], "--compilation-config")
    return None if text is None else dict(json.loads(text))


# graph_mode, K, padding -> sizes of four requests
GRAPHS = [
    ("full", 1, "placeholder", [2, 4, 8]),
    ("full", 1, "slack", [2, 4, 10]),
    ("full", 3, "auto", [4, 8, 16]),
    ("full", 3, "slack", [4, 8, 20]),
    ("full", 14, "slack", [15, 30, 900]),
    ("full", 15, "placeholder", [16, 32, 64]),
    ("full", 0, "slack", [1, 2, 4]),
    ("piecewise", 1, "auto", [2, 4, 8]),
    ("piecewise", 2, "slack", [3, 6, 15]),
    ("piecewise", 0, "auto", [1, 2, 4]),
]


@pytest.mark.parametrize(("mode", "k", "padding", "sizes"), GRAPHS)
@pytest.mark.parametrize("base", ["local", "local-single"])
def test_graph_mode_of_the_ranks_that_decode(
    base: str, mode: str, k: int, padding: str, sizes: list[int], copy: MakeCopy
) -> None:
    key = "serving.graph_mode" if base == "local-single" else "serving.decode.graph_mode"
    found = copy(base).edit({key: mode, "mtp.padding": padding})
    set_k(base, k, found.root)
    plan = api.plan(base, found.root)
    *prefill, decode = plan["ranks"]
    name = {"full": "FULL_DECODE_ONLY", "piecewise": "PIECEWISE"}[mode]
    assert compilation(decode) == {"mode": 0, "cudagraph_mode": name, "cudagraph_capture_sizes": sizes}
    assert "--enforce-eager" not in decode["argv"]
    assert decode["env"].get("VLLM_USE_BREAKABLE_CUDAGRAPH") == ("1" if mode == "piecewise" else None)
    for rank in prefill:
        assert "--enforce-eager" in rank["argv"] and compilation(rank) is None
        assert "VLLM_USE_BREAKABLE_CUDAGRAPH" not in rank["env"]
    assert (plan["graphs"]["mode"], plan["graphs"]["capture_sizes"]) == (mode, sizes)
    assert plan["graphs"]["slots"] * (k + 1) == sizes[-1]


def test_graph_mode_for_all_roles_leaves_prefill_eager(copy: MakeCopy) -> None:
    found = copy("local").edit({"serving.graph_mode": "full", "serving.decode": {"max_num_seqs": 3}})
    prefill, decode = api.plan("local", found.root)["ranks"]
    assert "--enforce-eager" in prefill["argv"] and compilation(prefill) is None
    assert (compilation(decode) or {})["cudagraph_capture_sizes"] == [2, 4, 6]


def test_stated_sizes_are_taken_and_left_out_when_eager(copy: MakeCopy) -> None:
    stated = {"cudagraph_capture_sizes": [8, 2], "max_cudagraph_capture_size": 8}
    found = copy("local").edit({"serving.decode": {"graph_mode": "full", "compilation_config": stated}})
    decode = api.plan("local", found.root)["ranks"][1]
    assert compilation(decode) == {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [2, 8],
        "max_cudagraph_capture_size": 8,
    }
    found.edit({"serving.decode.graph_mode": "eager"})
    decode = api.plan("local", found.root)["ranks"][1]
    assert "--enforce-eager" in decode["argv"] and compilation(decode) is None


def test_cpu_is_eager_where_nothing_is_stated(copy: MakeCopy) -> None:
    found = copy("local").edit({"serving.decode": None})
    assert all("--enforce-eager" in rank["argv"] for rank in api.plan("local", found.root)["ranks"])


@pytest.mark.parametrize(
    ("edits", "config", "eager"),
    [
        ({}, {"cudagraph_mode": "FULL_DECODE_ONLY"}, False),
        ({"graph_mode": "piecewise"}, {"cudagraph_mode": "PIECEWISE"}, False),
        ({"graph_mode": "eager"}, None, True),
        ({"graph_mode": None, "enforce_eager": True}, None, True),
        ({"graph_mode": None}, None, False),
        ({"compilation_config.cudagraph_mode": "FULL"}, {"cudagraph_mode": "FULL"}, False),
        ({"graph_mode": None, "compilation_config.cudagraph_mode": "FULL"}, {"cudagraph_mode": "FULL"}, False),
        (
            {"compilation_config.cudagraph_capture_sizes": [80]},
            {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [80]},
            False,
        ),
    ],
)
def test_graph_mode_on_ascend(
    edits: dict[str, Any], config: dict[str, Any] | None, eager: bool, copy: MakeCopy
) -> None:
    found = copy("a3").edit({f"serving.decode.{key}": value for key, value in edits.items()})
    decode = api.plan("a3", found.root)["ranks"][-1]
    assert compilation(decode) == config
    assert ("--enforce-eager" in decode["argv"]) == eager


def test_router_of_local() -> None:
    argv = PLAN["router"]["argv"]
    assert argv[:3] == ["{engine_python}", "-m", "vllm_router.launch_router"]
    assert flag(argv, "--port") == "8100"
    assert flag(argv, "--prometheus-port") == "8101"
    assert flag(argv, "--kv-connector") == "nixl"
    at = argv.index("--prefill")
    assert argv[at : at + 3] == ["--prefill", "http://127.0.0.1:8200", "none"]
    assert PLAN["router"]["front"] == {"host": "127.0.0.1", "port": 8000}


def test_listeners_name_the_file_and_key_of_their_port() -> None:
    by_owner = {found["owner"]: found for found in PLAN["listeners"]}
    decode = by_owner["decode-0"]
    assert (decode["file"], decode["key"]) == (
        "ansible/inventories/local/group_vars/all/topology.yml",
        "topology.decode.port",
    )
    a3 = {found["owner"]: found for found in api.plan("a3")["listeners"]}
    assert (a3["decode-31"]["host"], a3["decode-31"]["port"]) == ("d1", 7115)
    for found in PLAN["listeners"]:
        assert (api.repository() / found["file"]).is_file()


def test_url_brackets_ipv6() -> None:
    assert url("192.0.2.1", 80) == "http://192.0.2.1:80"
    assert url("2001:db8::1", 80) == "http://[2001:db8::1]:80"


def test_a_port_may_be_chosen_per_host(copy: MakeCopy) -> None:
    found = copy("a3").edit({"hosts.all.hosts.d1.rank_port": 7200})
    ports = {
        r["host"]: r["port"] for r in api.plan("a3", found.root)["ranks"] if r["name"] in ("decode-0", "decode-16")
    }
    assert ports == {"d0": 7100, "d1": 7200}


def parallel(dp: int, tp: int, devices: int, nodes: int) -> Cluster:
    """The a3 cluster with another decode layout."""
    data = api.load_checked("a3").model_dump()
    data["topology"]["devices_per_host"] = devices
    data["topology"]["decode"].update(dp=dp, tp=tp)
    for group in ("hosts", "children"):
        place = data["hosts"]["all"]
        kept = {f"d{n}": {"address": f"192.0.2.{100 + n}", "kv_port": 50000} for n in range(nodes)}
        if group == "hosts":
            place["hosts"] = {k: v for k, v in place["hosts"].items() if k.startswith("p")} | kept
        else:
            place["children"]["decode"] = {"hosts": dict.fromkeys(kept)}
    return Cluster.model_validate(data)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 64), st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([8, 16]), st.integers(1, 6))
def test_sound_layouts_cover_ranks_and_devices_once(dp: int, tp: int, devices: int, nodes: int) -> None:
    """Whatever R08 lets through, the rendered ranks cover every group and share no device."""
    cluster = parallel(dp, tp, devices, nodes)
    ranks = placement.place(cluster)
    if list(checks.rank_cover(cluster, ranks)):
        return
    decode = [rank for rank in ranks if rank.role == "decode"]
    assert len(decode) % dp == 0 and decode
    held = [(rank.host, device) for rank in decode for device in rank.devices]
    assert len(set(held)) == len(held) == len(decode) * tp
    assert all(device < devices for _, device in held)
    assert {rank.host for rank in decode} == set(cluster.host_names("decode"))
    assert [rule.id for rule, _ in rules.check_plan(render(cluster))] == []


def test_edit_keeps_everything_else() -> None:
    text = (api.inventories() / "local/group_vars/all/mtp.yml").read_text()
    edited = with_k(text, 3)
    changed = [(a, b) for a, b in zip(text.splitlines(), edited.splitlines(), strict=True) if a != b]
    assert changed == [("  num_speculative_tokens: 1", "  num_speculative_tokens: 3")]
    off = with_k(text, 0)
    changed = [(a, b) for a, b in zip(text.splitlines(), off.splitlines(), strict=True) if a != b]
    assert changed == [("  enabled: true", "  enabled: false")]
    assert with_k(off, 1) == text
    assert with_k(text, 1) == text


@pytest.mark.parametrize(
    "text",
    [
        "mtp: {enabled: false, num_speculative_tokens: 2, method: mtp}  # one line\n",
        "# head\nmtp:\n    num_speculative_tokens:   2   # K\n    enabled:   false # off\n    method: mtp\n",
        "mtp:\n  enabled: &on false\n  num_speculative_tokens: 0x2\n  method: 'mtp'\n",
        "base: &b {enabled: false, num_speculative_tokens: 2}\nmtp:\n  <<: *b\n  method: mtp\n",
        "mtp:\n  enabled:\n    false\n  num_speculative_tokens: 2\n  method: mtp",
    ],
)
def test_edit_of_unusual_layouts(text: str) -> None:
    edited = with_k(text, 3)
    assert YAML(typ="safe").load(edited)["mtp"] == {"enabled": True, "num_speculative_tokens": 3, "method": "mtp"}
    assert text.count("#") == edited.count("#")


def test_single_a3_node(copy: MakeCopy) -> None:
    """DeepSeek-R1 on one node: dp 4 x tp 4, K = 3, no hand-over."""
    found = copy("a3").edit(
        {
            "topology.connector": None,
            "topology.prefill": None,
            "topology.decode": None,
            "topology.single": {"dp": 4, "tp": 4, "port": 7100, "rpc_port": 12321},
            "mtp.num_speculative_tokens": 3,
            "serving.prefill": None,
            "serving.decode": None,
            "serving.single": {"max_num_seqs": 16, "max_num_batched_tokens": 4096, "gpu_memory_utilization": 0.92},
            "hosts.all.hosts": {"n0": {"address": "192.0.2.11", "nic": "eth0"}},
            "hosts.all.children": {group: {"hosts": {"n0": None}} for group in ("single", "router", "monitoring")},
        }
    )
    ranks = api.plan("a3", found.root)["ranks"]
    assert [rank["env"]["ASCEND_RT_VISIBLE_DEVICES"] for rank in ranks] == [
        "0,1,2,3",
        "4,5,6,7",
        "8,9,10,11",
        "12,13,14,15",
    ]
    assert [rank["port"] for rank in ranks] == [7100, 7101, 7102, 7103]
    for rank in ranks:
        assert spec(rank) == {"num_speculative_tokens": 3, "method": "deepseek_mtp"}
        assert flag(rank["argv"], "--gpu-memory-utilization") == "0.92"
        assert "--kv-transfer-config" not in rank["argv"]
        assert "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT" not in rank["env"]
