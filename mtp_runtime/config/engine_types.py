"""Types of the configuration that an engine takes as JSON: vllm-ascend's additional_config, and graphs.

Which release line has which key is said in mtp_runtime/releases.py.
"""

from typing import Annotated, Literal

from pydantic import Field

from .base_types import Count, Strict

TpSize = Annotated[int, Field(ge=0, le=4096)] | None


class FinegrainedTp(Strict):
    """vllm-ascend finegrained_tp_config: tensor parallel sizes of single modules (0 or absent = off)."""

    lmhead_tensor_parallel_size: TpSize = Field(None, description="ranks that share lm_head; 0 = off")
    oproj_tensor_parallel_size: TpSize = Field(None, description="ranks that share o_proj; 0 = off")
    embedding_tensor_parallel_size: TpSize = Field(None, description="ranks that share the embedding; 0 = off")
    mlp_tensor_parallel_size: TpSize = Field(None, description="ranks that share the dense MLPs; 0 = off")


class TorchairGraphConfig(Strict):
    """vllm-ascend torchair_graph_config: a decode step as one graph of torchair, until 0.11.0."""

    enabled: bool | None = Field(None, description="decode in torchair graphs; graph_mode is full then")
    graph_batch_sizes: Annotated[list[Count], Field(min_length=1)] | None = Field(
        None, description="graph sizes, requests; K + 1 query tokens each"
    )
    use_cached_graph: bool | None = Field(None, description="keep compiled graphs on disk")
    enable_view_optimize: bool | None = Field(
        None, description="torchair's view optimization; the engine's default: on"
    )
    enable_frozen_parameter: bool | None = Field(
        None, description="fix the addresses of weights; the engine's default: on"
    )
    enable_kv_nz: bool | None = Field(None, description="KV cache in NZ layout")
    enable_multistream_mla: bool | None = Field(None, description="vector operators of MLA on a stream of their own")
    enable_multistream_moe: bool | None = Field(None, description="shared expert on a stream of its own")
    enable_multistream_shared_expert: bool | None = Field(None, description="the same under its later name")


class AscendSchedulerConfig(Strict):
    """vllm-ascend ascend_scheduler_config: which scheduler, until 0.11.0."""

    enabled: bool | None = Field(None, description="true = the V0 scheduler, false or null = vLLM's V1 scheduler")
    enable_chunked_prefill: bool | None = Field(None, description="chunked prefill in the V0 scheduler")


# The linear layers that vllm-ascend 0.23.0's attention layers hold; it skips any other name with a line in its log.
ShardedLayer = Literal["q_proj", "q_b_proj", "kv_b_proj", "o_proj", "fused_qkv_a_proj", "kv_a_proj_with_mqa"]


class AdditionalConfig(Strict):
    """vllm-ascend --additional-config, the keys we have rules for."""

    torchair_graph_config: TorchairGraphConfig | None = Field(None, description="decode in torchair graphs")
    ascend_scheduler_config: AscendSchedulerConfig | None = Field(None, description="V0 or V1 scheduler")
    enable_weight_nz_layout: bool | None = Field(None, description="quantized weights in NZ layout")

    recompute_scheduler_enable: bool | None = Field(
        None, description="D gives a new request placeholder drafts and recomputes preempted ones"
    )
    multistream_overlap_shared_expert: bool | None = Field(None, description="shared expert on a stream of its own")
    enable_shared_expert_dp: bool | None = Field(None, description="shared expert data-parallel instead of split")
    enable_balance_scheduling: bool | None = Field(
        None, description="balance prefill and decode over the ranks, without P/D only"
    )
    finegrained_tp_config: FinegrainedTp | None = Field(None, description="tensor parallel sizes of single modules")
    layer_sharding: Annotated[list[ShardedLayer], Field(min_length=1)] | None = Field(
        None, description="linear layers whose weights are spread over the ranks of P"
    )
    enable_flashcomm1: bool | None = Field(None, description="FlashComm1: sequence parallel communication")
    enable_dsa_cp: bool | None = Field(
        None, description="context parallel sparse attention (DeepSeek-V3.2); FlashComm1"
    )


class CompilationConfig(Strict):
    """--compilation-config: graph mode and sizes (query tokens)."""

    cudagraph_mode: Literal["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"] | None = Field(
        None, description="which steps run as a graph, in vllm-ascend's words; on CPU graph_mode says it"
    )
    cudagraph_capture_sizes: Literal["auto"] | Annotated[list[Count], Field(min_length=1)] | None = Field(
        None,
        description="graph sizes, query tokens; auto = derived from max_num_seqs, K and padding; null = auto on CPU, "
        "on Ascend the engine's choice, or auto where that has none for a full batch",
    )
    max_cudagraph_capture_size: Count | None = Field(None, description="largest graph, query tokens")
