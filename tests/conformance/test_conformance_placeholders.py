"""A request's first step on D, by the real schedulers and the scheduler's side of the real Mooncake connector.

Placeholders are vllm-ascend's own: our runtime renders `recompute_scheduler_enable` and keeps them out of the draft
statistics. With slack the request keeps its one token.
"""

import json
import os
from typing import Any
from unittest.mock import patch

import cpu_runner
import pytest
from vllm.config import set_current_vllm_config
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from mtp_runtime.adapters.settings import settings
from mtp_runtime.adapters.vllm_ascend import placeholders as placeholders_patch

LIMIT = 1024
"""max_model_len of the helper's configurations."""
BLOCKS = 64
TRANSFER = {
    "kv_connector": "MooncakeConnectorV1",
    "kv_role": "kv_consumer",
    "kv_port": "30000",
    "engine_id": "0",
    "kv_connector_extra_config": {"prefill": {"dp_size": 1, "tp_size": 1}, "decode": {"dp_size": 1, "tp_size": 1}},
}
PLACEHOLDER = -1


def scheduler(k: int, placeholders: bool, asynchronous: bool = False, own: bool = False) -> Any:
    """The scheduler that the engine of a D server makes; own: vllm-ascend's class below ours."""
    words = ["--no-enable-prefix-caching", "--kv-transfer-config", json.dumps(TRANSFER)]
    words += ["--async-scheduling" if asynchronous else "--no-async-scheduling"]
    words += ["--additional-config", json.dumps({"recompute_scheduler_enable": placeholders})]
    with patch.dict(os.environ, {"MTP_PADDING": "placeholder" if placeholders else "slack"}):
        settings.cache_clear()
        made = cpu_runner.configuration(k, 4, *words)
    settings.cache_clear()
    made.cache_config.num_gpu_blocks = BLOCKS
    cache = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(cpu_runner.LAYERS, cpu_runner.cache_spec(made))])
    found = made.scheduler_config.get_scheduler_cls()
    with set_current_vllm_config(made), cpu_runner.edge():
        return (found.__mro__[2] if own else found)(
            made, cache, StructuredOutputManager(made), block_size=made.cache_config.block_size, log_stats=True
        )


def hand_over(made: Any, prompt: int, name: str = "r") -> Any:
    """A prompt of so many tokens whose KV comes from P; what is scheduled once it has come."""
    sampling = SamplingParams(
        max_tokens=64,
        extra_args={
            "kv_transfer_params": {
                "do_remote_prefill": True,
                "remote_block_ids": [[1]],
                "remote_engine_id": "1",
                "remote_host": "127.0.0.1",
                "remote_port": 30001,
                "remote_request_id": name,
            }
        },
    )
    made.add_request(Request(name, [1] * prompt, sampling, None))
    waits = made.schedule()
    assert not waits.num_scheduled_tokens, "its KV is under way"
    arrived = ModelRunnerOutput([], {}, kv_connector_output=KVConnectorOutput(finished_recving={name}))
    made.update_from_output(waits, arrived)
    return made.schedule()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("k", [1, 3])
def test_a_new_request_gets_k_placeholders(k: int, asynchronous: bool) -> None:
    made = scheduler(k, placeholders=True, asynchronous=asynchronous)
    assert type(made).__name__ == ("MtpAsyncRecomputeScheduler" if asynchronous else "MtpRecomputeScheduler")
    step = hand_over(made, 10)
    assert step.scheduled_spec_decode_tokens == {"r": [PLACEHOLDER] * k}
    assert step.num_scheduled_tokens == {"r": k + 1}
    # All but the last prompt token came from P.
    assert step.scheduled_new_reqs[0].num_computed_tokens == 9


@pytest.mark.parametrize(("prompt", "drafts"), [(LIMIT - 3, 3), (LIMIT - 2, 0), (LIMIT - 1, 0)])
def test_placeholders_stay_within_max_model_len(prompt: int, drafts: int) -> None:
    """K of them or none (va#9688): a request without room for all has one token, and its step no graph."""
    step = hand_over(scheduler(3, placeholders=True), prompt)
    assert len(step.scheduled_spec_decode_tokens.get("r", [])) == drafts
    tokens = step.num_scheduled_tokens["r"]
    assert tokens == drafts + 1 and step.scheduled_new_reqs[0].num_computed_tokens + tokens <= LIMIT


def counted(made: Any, step: Any, answer: list[int]) -> tuple[int, int, int] | None:
    """Draft steps, drafts and accepted drafts that the engine tells of a step; None where of none."""
    outputs = made.update_from_output(step, ModelRunnerOutput(["r"], {"r": 0}, [answer]))
    stats = next(found.scheduler_stats for found in outputs.values() if found.scheduler_stats)
    found = stats.spec_decoding_stats
    return found and (found.num_drafts, found.num_draft_tokens, found.num_accepted_tokens)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_placeholders_are_no_drafts(asynchronous: bool) -> None:
    """vllm-ascend's own class counts them; ours does not, and counts the drafts of the next step."""
    for own in (True, False):
        made = scheduler(3, placeholders=True, asynchronous=asynchronous, own=own)
        assert (type(made).__module__ == placeholders_patch.MODULE) == own
        step = hand_over(made, 10)
        # The sampler rejects placeholders: one token.
        assert counted(made, step, [5]) == ((1, 3, 0) if own else None)
        if asynchronous:
            made.requests["r"].spec_token_ids = [PLACEHOLDER] * 3
        else:
            made.update_draft_token_ids(DraftTokenIds(["r"], [[7, 8, 9]]))
        step = made.schedule()
        assert len(step.scheduled_spec_decode_tokens["r"]) == 3
        assert counted(made, step, [7, 8, 5]) == (1, 3, 2)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_with_slack_a_new_request_keeps_its_one_token(asynchronous: bool) -> None:
    step = hand_over(scheduler(3, placeholders=False, asynchronous=asynchronous), 10)
    assert step.num_scheduled_tokens == {"r": 1} and not step.scheduled_spec_decode_tokens
