"""MLA decode of K + 1 tokens a request on vLLM's CPU backend, by batch expansion.

vLLM's own CPU backend takes one token a request as decode and everything longer as a prefill with a gather of the
context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from mtp_runtime.adapters.vllm_cpu.counters import Count
from mtp_runtime.adapters.vllm_cpu.settings import InjectedFault, settings
from mtp_runtime.adapters.vllm_cpu.steps import Step
from mtp_runtime.attention.batch_expansion import expand_rows
from mtp_runtime.metrics import names


@dataclass
class RowsDecodeMetadata(MLACommonDecodeMetadata):
    """Decode metadata with one row a token: block_table [T, P], seq_lens [T], both int32.

    holds_drafts: the rows are those of a target step and hold every token of the requests with drafts.
    """

    holds_drafts: bool = False
    counted: bool = False


class MtpMLABackend(CPUMLABackend):
    """vLLM's CPU MLA backend with our metadata builder and decode. Keeps its name: vLLM compares it."""

    @staticmethod
    def get_impl_cls() -> type[MtpMLAImpl]:
        """The implementation class."""
        return MtpMLAImpl

    @staticmethod
    def get_builder_cls() -> type[MtpMLABuilder]:
        """The metadata builder class."""
        return MtpMLABuilder


class MtpMLABuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """Makes requests with up to K + 1 tokens decode requests and expands them to rows, once a step for all layers."""

    # Rows do not mind ragged lengths, so a batch in which one request has fewer drafts stays a decode batch.
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    _drafting = False

    def build_for_drafting(self, *args: Any, **kwargs: Any) -> MLACommonMetadata:
        """Metadata for the drafter's layer: the same rows, not counted as a target step."""
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
    ) -> RowsDecodeMetadata:
        if max_query_len <= 1:
            table, lengths = block_table_tensor.int().contiguous(), seq_lens_device.int()
        else:
            table, lengths = expand_rows(block_table_tensor, seq_lens_device, query_start_loc_cpu)
        holds = not self._drafting and 0 < Step.draft_rows <= num_decode_tokens
        return RowsDecodeMetadata(table, lengths, dcp_tot_seq_lens_device, holds_drafts=holds)


class MtpMLAImpl(CPUMLAImpl):
    """Decode through vLLM's kernel, which takes our rows as if each were a request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fault = settings().fault == "attention"
        self._calls = Count(names.PLUGIN_ATTENTION_DECODE_CALLS)
        self._steps = Count(names.PLUGIN_ATTENTION_DRAFT_STEPS)

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any) -> Any:
        """Decode [T, heads, 576] queries. Returns ([T, heads, 512], None)."""
        if self._fault:
            raise InjectedFault("attention")
        decode = attn_metadata.decode
        if decode.holds_drafts:
            self._calls.add()
            if not decode.counted:
                decode.counted = True
                self._steps.add()
        return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
