"""MLA decode of K + 1 tokens a request on vLLM's CPU backend, in the way that `mtp.attention` names.

tnd: one call over ragged segments. batch_expansion: vLLM's kernel, given one row a token. chunked_prefill: vLLM's own
backend, which takes one token a request as decode and everything longer as a prefill with a gather of the context.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from mtp_runtime.adapters.counters import Count
from mtp_runtime.adapters.settings import InjectedFault, settings
from mtp_runtime.adapters.vllm_cpu.steps import Step
from mtp_runtime.attention import native
from mtp_runtime.attention.batch_expansion import expand_rows
from mtp_runtime.attention.call import FiaCall
from mtp_runtime.attention.constraints import enforce
from mtp_runtime.attention.mask import causal_mask
from mtp_runtime.choice import BATCH_EXPANSION, CHUNKED_PREFILL, TND
from mtp_runtime.metrics import names

OPERATORS = {TND: "mtp_runtime.fused_infer_attention_score.default", BATCH_EXPANSION: "_C.mla_decode_kvcache.default"}
"""Way -> the operator that a recorded step calls once a layer."""


class KvWritten(Exception):
    """A layer's KV is written and nothing else was asked for."""


@dataclass
class SegmentsMetadata(MLACommonDecodeMetadata):
    """Decode metadata of requests with one or more tokens each.

    block_table [B, P], seq_lens [B] int32 (one row a token instead, [T, P] and [T], for batch expansion).
    request_table: block_table before it was expanded. actual_seq_lengths, actual_seq_lengths_kv: prefix sums of the
    requests' tokens, and their KV lengths.
    holds_drafts: these are all tokens of a target step's requests with drafts.
    """

    request_table: torch.Tensor | None = None
    actual_seq_lengths: list[int] = field(default_factory=list)
    actual_seq_lengths_kv: list[int] = field(default_factory=list)
    holds_drafts: bool = False
    counted: bool = False


class MtpMLABackend(CPUMLABackend):
    """vLLM's CPU MLA backend with our metadata builder and decode. Keeps its name: vLLM compares it."""

    @staticmethod
    def get_impl_cls() -> type[MtpMLAImpl]:
        """The implementation class."""
        return MtpMLAImpl

    @staticmethod
    def get_builder_cls() -> type[MLACommonMetadataBuilder[MLACommonMetadata]]:
        """The metadata builder class."""
        return OneTokenBuilder if settings().attention == CHUNKED_PREFILL else SegmentsBuilder


class SegmentsBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """Makes requests with up to K + 1 tokens decode requests, once a step for all layers."""

    # Segments do not mind ragged lengths, so a batch in which one request has fewer drafts stays a decode batch.
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    _drafting = False

    def build_for_drafting(self, *args: Any, **kwargs: Any) -> MLACommonMetadata:
        """Metadata for the drafter's layer: the same, not counted as a target step."""
        self._drafting = True
        try:
            return super().build_for_drafting(*args, **kwargs)
        finally:
            self._drafting = False

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
    ) -> SegmentsMetadata:
        starts = query_start_loc_cpu.tolist()
        # vLLM pads a batch for a static graph with requests of no tokens; ours pads in the graph's own buffers.
        requests = len(starts) - 1
        while requests and starts[requests] == starts[requests - 1]:
            requests -= 1
        table, lengths = block_table_tensor[:requests].int(), seq_lens_device[:requests].int()
        segments = SegmentsMetadata(
            table,
            lengths,
            dcp_tot_seq_lens_device,
            request_table=table,
            actual_seq_lengths=starts[1 : requests + 1],
            actual_seq_lengths_kv=lengths.tolist(),
            holds_drafts=not self._drafting and 0 < Step.draft_rows <= num_decode_tokens,
        )
        if settings().attention == BATCH_EXPANSION and max_query_len > 1:
            expand(segments, query_start_loc_cpu[: requests + 1])
        return segments


class OneTokenBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """vLLM's own: a request with more than one token is a prefill."""

    def build(self, *args: Any, **kwargs: Any) -> MLACommonMetadata:
        """As vLLM does; of a target step's prefill it notes whether its tokens are drafts."""
        metadata = super().build(*args, **kwargs)
        if metadata.prefill is not None:
            metadata.prefill.holds_drafts = (
                0 < Step.draft_rows <= metadata.num_actual_tokens - metadata.num_decode_tokens
            )
        return metadata

    def build_for_drafting(self, *args: Any, **kwargs: Any) -> MLACommonMetadata:
        """As vLLM does, not counted as a target step."""
        metadata = super().build_for_drafting(*args, **kwargs)
        if metadata.prefill is not None:
            metadata.prefill.holds_drafts = False
        return metadata

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        *args: Any,
        dcp_tot_seq_lens_device: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> SegmentsMetadata:
        return SegmentsMetadata(block_table_tensor.int(), seq_lens_device.int(), dcp_tot_seq_lens_device)


def expand(segments: SegmentsMetadata, query_start_loc: torch.Tensor) -> None:
    """Replace table and lengths by one row a token. query_start_loc: [B + 1]."""
    segments.block_table, segments.seq_lens = expand_rows(segments.block_table, segments.seq_lens, query_start_loc)


class MtpMLAImpl(CPUMLAImpl):
    """Decode and KV write of one layer."""

    stop_after_write = False
    """Raise KvWritten once a layer's KV is written: how the drafter keeps its KV up to date without drafting."""
    _checked: ClassVar[set[tuple[Any, ...]]] = set()
    """Shapes of calls that an NPU would take."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        native.load()
        self._way = settings().attention
        self._fault = settings().fault == "attention"
        self._debug = settings().debug
        # Here, for a mask made while a graph is recorded would be made again by each replay.
        self._mask = causal_mask() if self._way == TND else None
        self._calls = Count(names.PLUGIN_ATTENTION_DECODE_CALLS)
        self._steps = Count(names.PLUGIN_ATTENTION_DRAFT_STEPS)

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any) -> Any:
        """Decode queries [T, heads, 512 and 64]. Returns ([T, heads, 512], None).

        TND: the very call that an NPU gets. Raises FiaConstraintError where it breaks a rule of that operator.
        """
        decode = attn_metadata.decode
        self._count(decode)
        if self._way != TND:
            return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
        nope, rope = q if isinstance(q, tuple) else q.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        latents = kv_c_and_k_pe_cache[..., : self.kv_lora_rank]
        arguments = {
            "query_rope": rope,
            "key_rope": kv_c_and_k_pe_cache[..., self.kv_lora_rank :],
            "atten_mask": self._mask,
            "actual_seq_lengths": decode.actual_seq_lengths,
            "actual_seq_lengths_kv": decode.actual_seq_lengths_kv,
            "block_table": decode.block_table,
            "num_heads": self.num_heads,
            "scale": self.scale,
            "num_key_value_heads": 1,
            "input_layout": "TND",
            "sparse_mode": 3,
            "block_size": kv_c_and_k_pe_cache.shape[1],
        }
        self._check(nope, latents, arguments)
        return torch.ops.mtp_runtime.fused_infer_attention_score(nope, latents, latents, **arguments), None

    def _check(self, query: torch.Tensor, latents: torch.Tensor, arguments: dict[str, Any]) -> None:
        """The first call of each shape, or all of them with MTP_DEBUG=1. A replayed graph comes by here only when it
        is recorded."""
        rope, table = arguments["query_rope"], arguments["block_table"]
        ends, lengths = arguments["actual_seq_lengths"], arguments["actual_seq_lengths_kv"]
        # Written out: it stands in the way of every call.
        shapes = (query.shape, rope.shape, latents.shape, table.shape, len(ends), len(lengths), self.num_heads)
        shape = (shapes, query.dtype, rope.dtype, latents.dtype, table.dtype)
        if self._debug or shape not in self._checked:
            enforce(FiaCall.from_tensors(query, latents, latents, **arguments), engine="cpu")
            self._checked.add(shape)

    def forward_mha(self, *args: Any, **kwargs: Any) -> None:
        """Prefill as vLLM does it; arguments too, the metadata fifth."""
        self._count(args[4].prefill)
        super().forward_mha(*args, **kwargs)

    def _count(self, part: Any) -> None:
        """Count a layer's call over drafts, and the step once for all its layers."""
        if getattr(part, "holds_drafts", False):
            if self._fault:
                raise InjectedFault("attention")
            self._calls.add()
            if not getattr(part, "counted", False):
                part.counted = True
                self._steps.add()

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """Write [T, 512] and [T, 1, 64] to their slots, -1 to none. vLLM's own looks at values, which no graph can."""
        if kv_cache.numel():
            tokens = slot_mapping.shape[0]
            torch.ops.mtp_runtime.write_latent_kv(kv_c_normed[:tokens], k_pe[:tokens], kv_cache, slot_mapping.long())
        if MtpMLAImpl.stop_after_write:
            raise KvWritten
