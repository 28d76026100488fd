"""TND: verify K + 1 tokens of a request in one decode call over a paged latent cache (MLA).

All tokens of a step stand in one row of segments [T, heads, ...], a segment a slot; the KV of a slot is read once for
all tokens of its segment. The arguments are those of torch_npu's `npu_fused_infer_attention_score` in TND layout with
paged KV and compressed causal mask (sparse mode 3), so that one call site serves CPU and NPU.

Here is the readable form in torch. `native` registers it, or a C++ kernel that agrees with it, as operator
`mtp_runtime::fused_infer_attention_score`, and likewise `write_latent_kv`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

LATENT, ROPE = 512, 64
"""Head sizes of DeepSeek's MLA, the only ones FIA takes (fia_tnd_constraints: D, T); a cache row is both in a row."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the operators take. The functions here take any floating point type."""


def want(good: bool, name: str, what: str) -> None:
    """Raises ValueError about the argument `name` unless it is good."""
    if not good:
        raise ValueError(f"{name}: {what}")


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    query_rope: Tensor,
    key_rope: Tensor,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: Sequence[int],
    actual_seq_lengths_kv: Sequence[int],
    block_table: Tensor,
    num_heads: int,
    scale: float,
    num_key_value_heads: int = 1,
    input_layout: str = "TND",
    sparse_mode: int = 3,
    block_size: int = 16,
) -> Tensor:
    """Causal attention of ragged segments over paged latents: softmax(scale (q . k + q_rope . k_rope)) v.

    query [T, N, D] (absorbed into the latent space), query_rope [T, N, R]; key [blocks, block_size, D] and key_rope
    [blocks, block_size, R], views of the cache; value: shaped like key, in MLA key itself. Any strides.
    actual_seq_lengths: prefix sums of the segments' lengths, one entry a slot, the last equals T; some may be empty.
    actual_seq_lengths_kv: entries of each slot, the step's own tokens included. block_table [slots, P] int32: only the
    entries that these lengths use are read. atten_mask: FIA's compressed mask, always the same and not read.
    Token j of a segment with q tokens sees the first kv - q + 1 + j entries; without any it yields zeros.
    Returns [T, N, D] in the type of query; half types are computed in float32.

    The number of torch operators does not depend on the batch. Memory does: every KV entry is gathered, and segments
    and lengths are padded to the longest. Results may differ in the last bits with the rest of the batch, which
    decides how torch multiplies.
    Raises ValueError that names the argument. Source: torch_npu's documentation of the operator, version 1.
    """
    check(
        query,
        key,
        value,
        query_rope=query_rope,
        key_rope=key_rope,
        atten_mask=atten_mask,
        actual_seq_lengths=actual_seq_lengths,
        actual_seq_lengths_kv=actual_seq_lengths_kv,
        block_table=block_table,
        num_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        input_layout=input_layout,
        sparse_mode=sparse_mode,
        block_size=block_size,
    )
    longest = max(actual_seq_lengths_kv, default=0)
    if not len(query) or not longest:
        return query.new_zeros(query.shape)
    exact = query.dtype if query.dtype == torch.float64 else torch.float32
    ends, lengths = torch.tensor(actual_seq_lengths), torch.tensor(actual_seq_lengths_kv)
    counts = ends.diff(prepend=ends.new_zeros(1))
    owner = torch.repeat_interleave(counts, output_size=len(query))
    place = torch.arange(len(query)) - (ends - counts)[owner]

    positions = torch.arange(longest)
    used = positions < lengths[:, None]
    blocks = torch.where(used, block_table[:, positions // block_size], 0).long()
    if bool(((blocks < 0) | (blocks >= len(key))).any()):
        raise ValueError(f"block_table: an id in use is not in 0..{len(key) - 1}")
    # What lies beyond a slot's length is anyone's: nought times it could still be NaN.
    keys, ropes, values = (
        torch.where(used[..., None], part[blocks, positions % block_size], 0).to(exact)
        for part in (key, key_rope, value)
    )

    segments = query.new_zeros(
        len(ends), int(counts.max()), num_heads, query.shape[2] + query_rope.shape[2], dtype=exact
    )
    segments[owner, place] = torch.cat((query, query_rope), dim=-1).to(exact)
    scores = segments.flatten(1, 2) @ torch.cat((keys, ropes), dim=-1).transpose(1, 2) * scale
    visible = (lengths - counts + 1)[:, None] + torch.arange(segments.shape[1])
    hidden = positions >= visible.repeat_interleave(num_heads, dim=1)[..., None]
    mixed = scores.masked_fill_(hidden, -torch.inf).softmax(-1) @ values
    sees = visible[owner, place] > 0
    out = mixed.unflatten(1, (-1, num_heads))[owner, place]
    return torch.where(sees[:, None, None], out, 0).to(query.dtype)


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    query_rope: Tensor,
    key_rope: Tensor,
    atten_mask: Tensor | None,
    actual_seq_lengths: Sequence[int],
    actual_seq_lengths_kv: Sequence[int],
    block_table: Tensor,
    num_heads: int,
    num_key_value_heads: int,
    input_layout: str,
    sparse_mode: int,
    block_size: int,
) -> None:
    """Raises ValueError that names the first argument of `attend` that does not fit the others."""

    want(input_layout == "TND", "input_layout", f"only TND, not {input_layout}")
    want(sparse_mode == 3, "sparse_mode", f"only 3 (causal), not {sparse_mode}")
    want(num_key_value_heads == 1, "num_key_value_heads", f"MLA has 1, not {num_key_value_heads}")
    want(query.dim() == 3, "query", f"must be [T, N, D], not {list(query.shape)}")
    tokens, heads, size = query.shape
    want(query.is_floating_point(), "query", f"must be floating point, not {query.dtype}")
    want(heads == num_heads, "num_heads", f"{num_heads}, but query has {heads}")
    want(query_rope.dim() == 3, "query_rope", f"must be [T, N, R], not {list(query_rope.shape)}")
    want(query_rope.shape[:2] == query.shape[:2], "query_rope", "tokens and heads must be those of query")
    want(key.dim() == 3 and key.shape[2] == size, "key", f"must be [blocks, block_size, {size}], not {list(key.shape)}")
    want(key.shape[1] == block_size, "block_size", f"{block_size}, but key has {key.shape[1]}")
    want(
        key_rope.dim() == 3 and key_rope.shape == (*key.shape[:2], query_rope.shape[2]),
        "key_rope",
        f"must be {[*key.shape[:2], query_rope.shape[2]]}, not {list(key_rope.shape)}",
    )
    want(value.shape == key.shape, "value", f"must be {list(key.shape)} like key, not {list(value.shape)}")
    for name, tensor in (("query_rope", query_rope), ("key", key), ("key_rope", key_rope), ("value", value)):
        want(tensor.dtype == query.dtype, name, f"must be {query.dtype} like query, not {tensor.dtype}")
    want(block_table.dtype == torch.int32, "block_table", f"must be int32, not {block_table.dtype}")
    slots = len(actual_seq_lengths)
    shaped = block_table.dim() == 2 and len(block_table) == slots
    want(shaped, "block_table", f"must be [{slots}, P], not {list(block_table.shape)}")
    if atten_mask is not None:
        want(atten_mask.shape == (2048, 2048), "atten_mask", f"must be [2048, 2048], not {list(atten_mask.shape)}")
    want(
        len(actual_seq_lengths_kv) == slots,
        "actual_seq_lengths_kv",
        f"{len(actual_seq_lengths_kv)} entries for {slots} slots",
    )
    starts = (0, *actual_seq_lengths)
    rising = all(map(operator.le, starts, actual_seq_lengths))
    want(rising, "actual_seq_lengths", "prefix sums must not fall, nor be negative")
    want(starts[-1] == tokens, "actual_seq_lengths", f"the last must equal T = {tokens}, not {starts[-1]}")
    longest, shortest = max(actual_seq_lengths_kv, default=0), min(actual_seq_lengths_kv, default=0)
    want(shortest >= 0, "actual_seq_lengths_kv", f"must not be negative, is {shortest}")
    room = block_table.shape[1] * block_size
    want(longest <= room, "actual_seq_lengths_kv", f"{longest} is more than the {room} entries of a row of block_table")


def write_latent_kv(kv_c: Tensor, k_pe: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Write the latents of a step into the paged cache, in place.

    kv_c [T, D], k_pe [T, R] or [T, 1, R], cache [blocks, block_size, D + R], all of one type; slot_mapping [T] int64 or
    int32: the row of the cache, counted over all blocks, of each token; below 0: that token is not written.
    Two tokens for one row: which of them stays is undefined.

    No branch and no copy to the host depends on the values, so the call can be recorded: tokens without a row repeat
    the write of the first token that has one, or, when none has, write the first row of the cache as it is.
    Raises ValueError that names the argument, and IndexError for rows that do not exist.
    """
    check_write(kv_c, k_pe, cache, slot_mapping)
    if not len(kv_c):
        return
    slots = slot_mapping.long()
    rows = torch.cat((kv_c, k_pe.flatten(1)), dim=-1)
    written = slots >= 0
    first = written.int().argmax().view(1)
    slot = torch.where(written.any(), slots.index_select(0, first), 0)
    row = torch.where(written.any(), rows.index_select(0, first), cache[0, 0])
    slots, rows = torch.where(written, slots, slot), torch.where(written[:, None], rows, row)
    size = cache.shape[1]
    cache.index_put_((slots // size, slots % size), rows)


def check_write(kv_c: Tensor, k_pe: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Raises ValueError that names the first argument of `write_latent_kv` that does not fit the others."""

    want(kv_c.dim() == 2, "kv_c", f"must be [T, D], not {list(kv_c.shape)}")
    tokens = len(kv_c)
    one = k_pe.dim() == 3 and k_pe.shape[1] == 1
    want((k_pe.dim() == 2 or one) and len(k_pe) == tokens, "k_pe", f"must be [{tokens}, R], not {list(k_pe.shape)}")
    width = kv_c.shape[-1] + k_pe.shape[-1]
    fits = cache.dim() == 3 and cache.shape[2] == width
    want(fits, "cache", f"must be [blocks, block_size, {width}], not {list(cache.shape)}")
    for name, tensor in (("kv_c", kv_c), ("k_pe", k_pe)):
        want(tensor.dtype == cache.dtype, name, f"must be {cache.dtype} like cache, not {tensor.dtype}")
    want(slot_mapping.shape == (tokens,), "slot_mapping", f"must be [{tokens}], not {list(slot_mapping.shape)}")
    integer = slot_mapping.dtype in (torch.int64, torch.int32)
    want(integer, "slot_mapping", f"must be int64 or int32, not {slot_mapping.dtype}")
