"""What the real packages take silently, or fail on late, is refused by our rules with an id.

One table: the engine's own words, what comes of them there, and the same setting in a cluster file with our rule.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from inventories import edited
from real_config import make_config, write_model

from mtp_runtime.config import api
from mtp_runtime.config.problems import ConfigError

FULL = {"cudagraph_mode": "FULL_DECODE_ONLY"}
ADD, COMPILE = "serving.decode.additional_config", "serving.decode.compilation_config"


def set_up() -> Any:
    from vllm_ascend.ascend_config import get_ascend_config

    return get_ascend_config()


def kept(key: str) -> Callable[[Any], bool]:
    """Taken, and no attribute of anything: nobody reads it."""
    return lambda config: key in config.additional_config and not hasattr(set_up(), key)


def captured(config: Any) -> list[int]:
    """Sizes after the rounding that a worker does."""
    config.compilation_config.adjust_cudagraph_sizes_for_spec_decode(config.num_speculative_tokens + 1, 1)
    return config.compilation_config.cudagraph_capture_sizes


@dataclass(frozen=True)
class Case:
    """role: of the KV transfer, or None without P/D. there: what holds of the configuration that the engine made.

    rule, key: ours; edits: of the inventory base, dotted.
    """

    there: Callable[[Any], bool]
    rule: str
    key: str
    edits: dict[str, Any]
    base: str = "a3"
    k: int = 1
    role: str | None = None
    additional: dict[str, Any] = field(default_factory=dict)
    compilation: dict[str, Any] = field(default_factory=lambda: FULL)
    speculative: dict[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] = ()

    def config(self, folder: Path) -> Any:
        """Through the real platform."""
        spec = {"num_speculative_tokens": self.k, "method": "mtp"} | self.speculative
        words = ["--max-model-len", "4096", "--max-num-seqs", "16", "--quantization", "ascend", *self.words]
        words += ["--speculative-config", json.dumps(spec), "--compilation-config", json.dumps(self.compilation)]
        words += ["--additional-config", json.dumps(self.additional)] if self.additional else []
        if self.role:
            one = {"dp_size": 1, "tp_size": 1}
            transfer = {"kv_connector": "MooncakeLayerwiseConnector", "kv_role": self.role, "kv_port": "36000"}
            extra = {"kv_connector_extra_config": {"prefill": one, "decode": one}}
            words += ["--kv-transfer-config", json.dumps(transfer | extra)]
        return make_config(write_model(folder), words)


def recomputes(config: Any) -> bool:
    return "RecomputeScheduler" in str(config.scheduler_config.scheduler_cls)


CASES = {
    "an unknown key": Case(
        kept("nonsense"), "C01", f"{ADD}.nonsense", {f"{ADD}.nonsense": 1}, additional={"nonsense": 1}
    ),
    "the key of a graph mode that is gone": Case(
        kept("torchair_graph_config"),
        "R46",
        f"{ADD}.torchair_graph_config.enabled",
        {f"{ADD}.torchair_graph_config": {"enabled": True}},
        additional={"torchair_graph_config": {"enabled": True}},
    ),
    "the key of a scheduler that is gone": Case(
        kept("ascend_scheduler_config"),
        "R46",
        f"{ADD}.ascend_scheduler_config.enabled",
        {f"{ADD}.ascend_scheduler_config": {"enabled": True}},
        additional={"ascend_scheduler_config": {"enabled": True}},
    ),
    "an unknown key one level down": Case(
        lambda config: not hasattr(set_up().finegrained_tp_config, "lm_head"),
        "C01",
        f"{ADD}.finegrained_tp_config.lm_head",
        {f"{ADD}.finegrained_tp_config.lm_head": 16},
        additional={"finegrained_tp_config": {"lm_head": 16}},
    ),
    "'false' is on": Case(
        recomputes,
        "C02",
        f"{ADD}.recompute_scheduler_enable",
        {f"{ADD}.recompute_scheduler_enable": "false"},
        role="kv_consumer",
        additional={"recompute_scheduler_enable": "false"},
    ),
    "'no' is on": Case(
        lambda config: bool(set_up().multistream_overlap_shared_expert),
        "C02",
        f"{ADD}.multistream_overlap_shared_expert",
        {f"{ADD}.multistream_overlap_shared_expert": "no"},
        additional={"multistream_overlap_shared_expert": "no"},
    ),
    "half a rank": Case(
        lambda config: set_up().finegrained_tp_config.lmhead_tensor_parallel_size == 0.5,
        "C02",
        f"{ADD}.finegrained_tp_config.lmhead_tensor_parallel_size",
        {f"{ADD}.finegrained_tp_config.lmhead_tensor_parallel_size": 0.5},
        additional={"finegrained_tp_config": {"lmhead_tensor_parallel_size": 0.5}},
    ),
    "fewer than no ranks": Case(
        lambda config: set_up().finegrained_tp_config.lmhead_tensor_parallel_size == -4,
        "C03",
        f"{ADD}.finegrained_tp_config.lmhead_tensor_parallel_size",
        {f"{ADD}.finegrained_tp_config.lmhead_tensor_parallel_size": -4},
        additional={"finegrained_tp_config": {"lmhead_tensor_parallel_size": -4}},
    ),
    "a text for a list": Case(
        lambda config: set_up().layer_sharding == "q_b_proj",
        "C02",
        "serving.prefill.additional_config.layer_sharding",
        {"serving.prefill.additional_config.layer_sharding": "q_b_proj"},
        role="kv_producer",
        additional={"layer_sharding": "q_b_proj"},
    ),
    "a layer that is not there": Case(
        lambda config: set_up().layer_sharding == ["o_prj"],
        "C03",
        "serving.prefill.additional_config.layer_sharding[0]",
        {"serving.prefill.additional_config.layer_sharding": ["o_prj"]},
        role="kv_producer",
        additional={"layer_sharding": ["o_prj"]},
    ),
    "the recompute scheduler on P is switched off": Case(
        lambda config: config.additional_config["recompute_scheduler_enable"] is False and not recomputes(config),
        "R09",
        "serving.prefill.additional_config.recompute_scheduler_enable",
        {"serving.prefill.additional_config.recompute_scheduler_enable": True},
        role="kv_producer",
        additional={"recompute_scheduler_enable": True},
    ),
    "an overlap that tensor parallelism does without": Case(
        lambda config: set_up().multistream_overlap_shared_expert is True and not set_up().enable_shared_expert_dp,
        "R11",
        "serving.additional_config.multistream_overlap_shared_expert",
        {"serving.additional_config.multistream_overlap_shared_expert": True},
        base="a3-single",
        additional={"multistream_overlap_shared_expert": True},
        words=("--tensor-parallel-size", "4"),
    ),
    "context parallelism without its communication": Case(
        lambda config: not set_up().enable_flashcomm1,
        "R47",
        "serving.prefill.additional_config.enable_dsa_cp",
        {"serving.prefill.additional_config.enable_flashcomm1": None},
        base="a3-v32",
        additional={"enable_dsa_cp": True},
    ),
    "17 tokens a request": Case(
        lambda config: config.num_speculative_tokens == 16,
        "R03",
        "mtp.num_speculative_tokens",
        {"mtp.num_speculative_tokens": 16},
        k=16,
        # With whole-step graphs our patch graph_sizes speaks first.
        compilation={"cudagraph_mode": "PIECEWISE"},
    ),
    "sizes between the multiples": Case(
        lambda config: captured(config) != [2, 4, 8, 16],
        "R04",
        f"{COMPILE}.cudagraph_capture_sizes",
        {f"{COMPILE}.cudagraph_capture_sizes": [2, 4, 8, 16], "mtp.num_speculative_tokens": 2},
        k=2,
        compilation=FULL | {"cudagraph_capture_sizes": [2, 4, 8, 16]},
    ),
    "a size that no batch reaches": Case(
        lambda config: 200 not in captured(config),
        "R04",
        f"{COMPILE}.cudagraph_capture_sizes",
        {f"{COMPILE}.cudagraph_capture_sizes": [2, 200]},
        compilation=FULL | {"cudagraph_capture_sizes": [2, 200]},
    ),
    "a full step that does not fit": Case(
        lambda config: config.scheduler_config.max_num_batched_tokens == 32 < 16 * 4,
        "R06",
        "serving.decode.max_num_batched_tokens",
        {"serving.decode.max_num_batched_tokens": 80, "mtp.num_speculative_tokens": 3},
        k=3,
        words=("--max-num-batched-tokens", "32"),
    ),
    "an unpadded drafter in a full graph": Case(
        lambda config: config.speculative_config.disable_padded_drafter_batch,
        "R17",
        "mtp.disable_padded_drafter_batch",
        {"mtp.disable_padded_drafter_batch": True},
        speculative={"disable_padded_drafter_batch": True},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_engine_takes_it_and_we_do_not(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    assert case.there(case.config(tmp_path / "weights"))
    found = refused(case, tmp_path)
    assert (case.rule, case.key) in found, found


def refused(case: Case, tmp_path: Path) -> list[tuple[str, str]]:
    """Rule and key of everything that our check says about the edited inventory."""
    edited(case.base, case.edits, tmp_path)
    with pytest.raises(ConfigError) as error:
        api.check(case.base, tmp_path)
    return [(problem.rule, problem.key) for problem in error.value.problems]


def test_17_tokens_fail_in_the_metadata_builder(tmp_path: Path) -> None:
    import vllm_ascend.ops  # noqa: F401
    from vllm.config import set_current_vllm_config
    from vllm.v1.kv_cache_interface import MLAAttentionSpec
    from vllm_ascend.attention.mla_v1 import AscendMLAMetadataBuilder

    config = CASES["17 tokens a request"].config(tmp_path)
    spec = MLAAttentionSpec(block_size=128, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    # Of the layer, which is not made here, the builder asks for the kernel that prefills.
    config.compilation_config.static_forward_context["layer"] = SimpleNamespace(prefill_backend=None)
    with set_current_vllm_config(config), pytest.raises(AssertionError, match="limit of 16"):
        AscendMLAMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))


def test_an_unpadded_drafter_fails_when_the_worker_makes_its_drafter() -> None:
    from cpu_runner import configuration, make_runner

    spec = json.dumps({"method": "mtp", "num_speculative_tokens": 1, "disable_padded_drafter_batch": True})
    config = configuration(1, 4, "--speculative-config", spec)
    with pytest.raises(NotImplementedError, match="only supports padded drafter batch"):
        make_runner(config)


EARLY = {
    "an unknown compilation key": ({}, {"nonsense": 1}, f"{COMPILE}.nonsense", "C01"),
    "an unknown graph mode": ({}, {"cudagraph_mode": "FULL_DECODE"}, f"{COMPILE}.cudagraph_mode", "C03"),
    "a text for a size": (
        {"finegrained_tp_config": {"lmhead_tensor_parallel_size": "16"}},
        FULL,
        f"{ADD}.finegrained_tp_config.lmhead_tensor_parallel_size",
        "C02",
    ),
}


@pytest.mark.parametrize("name", EARLY)
def test_what_the_engine_refuses_at_its_start_we_refuse_before(name: str, tmp_path: Path) -> None:
    additional, compilation, key, rule = EARLY[name]
    leaf: Any = compilation if compilation != FULL else additional
    while isinstance(leaf, dict):
        (leaf,) = leaf.values()
    case = Case(bool, rule, key, {key: leaf}, additional=additional, compilation=compilation)
    with pytest.raises((Exception, SystemExit)) as error:
        case.config(tmp_path / "weights")
    assert not isinstance(error.value, ConfigError)
    assert (rule, key) in refused(case, tmp_path)
