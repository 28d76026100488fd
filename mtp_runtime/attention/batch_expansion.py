"""Batch expansion: verify K + 1 tokens of a request by giving the decode kernel one row a token.

Every query token becomes a row of its own, with the block table of its request and a KV length that ends at itself,
so causality needs no mask. The price: the KV of a request is read once a token. Plain data, no engine.
"""

from __future__ import annotations

import torch


def expand_rows(
    block_table: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows for the decode kernel, ragged query lengths allowed.

    block_table [B, P] int32; seq_lens [B] int32, KV length with the step's own tokens; query_start_loc [B + 1],
    prefix sums of the query lengths, beginning at 0.
    Returns (block_table [T, P] int32 contiguous, seq_lens [T] int32): token j of a request with q tokens sees
    seq_len - q + 1 + j entries. A request without tokens yields no row.
    """
    lengths = query_start_loc[1:] - query_start_loc[:-1]
    total = int(query_start_loc[-1])
    owner = torch.repeat_interleave(lengths, output_size=total)
    # Distance of a token to the last one of its request: the entries it must not see.
    behind = query_start_loc[1:][owner] - 1 - torch.arange(total, dtype=query_start_loc.dtype)
    return block_table[owner].int().contiguous(), (seq_lens[owner] - behind).int()
