"""What breaks each rule of a call: one function a rule, which `constraints.RULES` names beside what must hold.

A function stays silent where another one has already refused what it would build on, so one fault is one violation.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

from mtp_runtime.attention.call import SCHEMA, V1_NAMES, FiaCall, Foreign, kind, odd_entry
from mtp_runtime.attention.cann import Limits

LATENT, ROPE = 512, 64
"""Head sizes."""
# Not kept: for version 1, 32, 64 or 128 alone. Its pages in op-plugin 7.1.0 and 7.2.0 say so, and its docstring up to
# 26.1.0; its pages from 7.3.0 on, all of version 2's, and the tiling check take these.
HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
LAYOUTS = ("TND", "TND_NTD")
LONGEST_SEGMENT = 16
MAX_BATCH = 4096
MAX_QUERY_BYTES = 2**20
"""T times the bytes of an element, whatever heads and head size are."""
MASK_SIZE = 2048
MASK_DTYPES = ("int8", "bool")
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

Findings = Iterator[tuple[str, str]]
"""What breaks a rule: argument (version 1's name) and its value."""


def _brief(values: Sequence[int]) -> str:
    """A list, its middle left out where it is long."""
    if len(values) <= 8:
        return str(list(values))
    return f"[{', '.join(map(str, values[:4]))}, ..., {', '.join(map(str, values[-3:]))}]"


def is_mask_shape(shape: tuple[int, ...]) -> bool:
    """Whether a mask of sparse mode 3 may have this shape: [2048, 2048], or with one or two 1s before it."""
    return shape[-2:] == (MASK_SIZE, MASK_SIZE) and shape[:-2] in ((), (1,), (1, 1))


def argument_names(call: FiaCall, limits: Limits) -> Findings:
    for written in call.names:
        if written not in SCHEMA[call.version]:
            name = V1_NAMES.get(written, written)
            yield name, f"given as {written}" if call.name(name) != written else "given"


def _both_lists(call: FiaCall) -> Iterator[tuple[str, Any, Sequence[int] | None]]:
    """Argument, value and, unless it is something else, the list with entries."""
    yield "actual_seq_lengths", call.actual_seq_lengths, call.ends
    yield "actual_seq_lengths_kv", call.actual_seq_lengths_kv, call.kv


def host_lists(call: FiaCall, limits: Limits) -> Findings:
    for argument, values, usable in _both_lists(call):
        if usable or values is None:
            continue
        if not isinstance(values, list | tuple):
            yield argument, f"a {values.kind if isinstance(values, Foreign) else kind(values)}"
        elif odd := odd_entry(values):
            yield argument, f"a list whose entry {odd[0]}, {odd[1]}"


def given(call: FiaCall, limits: Limits) -> Findings:
    for argument, values, _ in _both_lists(call):
        if values is None or (isinstance(values, list | tuple) and not values):
            yield argument, str(values)


def _falls(values: Sequence[int]) -> str | None:
    """Where prefix sums fall or are negative, None when they do neither."""
    if values[0] < 0:
        return f"{_brief(values)}: begins below 0"
    if all(map(operator.le, values, values[1:])):
        return None
    place = next(i for i in range(1, len(values)) if values[i] < values[i - 1])
    return f"{_brief(values)}: falls from {values[place - 1]} to {values[place]} at entry {place}"


def prefix_sums(call: FiaCall, limits: Limits) -> Findings:
    if call.ends and call.segments is None and (fall := _falls(call.ends)):
        yield "actual_seq_lengths", fall


def last_is_t(call: FiaCall, limits: Limits) -> Findings:
    if call.ends and call.tokens not in (None, call.ends[-1]):
        yield "actual_seq_lengths", f"{_brief(call.ends)}: the last is {call.ends[-1]}, T is {call.tokens}"


def segment_lengths(call: FiaCall, limits: Limits) -> Findings:
    ends, counts = call.ends, call.segments
    if not ends or not counts or (limits.shortest <= min(counts) and max(counts) <= LONGEST_SEGMENT):
        return
    wrong = [i for i, tokens in enumerate(counts) if not limits.shortest <= tokens <= LONGEST_SEGMENT]
    more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    yield "actual_seq_lengths", f"{_brief(ends)}: {counts[wrong[0]]} tokens in segment {wrong[0]}{more}"


def kv_paged(call: FiaCall, limits: Limits) -> Findings:
    if not call.kv or not call.paged:
        return
    capacity = call.kv_capacity
    if capacity is None and call.latent:
        capacity = call.latent.blocks * call.latent.block_size
    if min(call.kv) < 0:
        yield "actual_seq_lengths_kv", f"{_brief(call.kv)}: {min(call.kv)} at entry {call.kv.index(min(call.kv))}"
    if capacity is not None and max(call.kv) > capacity:
        place = call.kv.index(max(call.kv))
        yield "actual_seq_lengths_kv", f"{_brief(call.kv)}: {max(call.kv)} at entry {place}, the cache holds {capacity}"


def _lacks_pages(call: FiaCall, limits: Limits) -> bool:
    """Whether KV is not paged where it must be. How key and KV lengths would be read without pages is idle then."""
    return limits.paged_only and not call.paged


def kv_not_paged(call: FiaCall, limits: Limits) -> Findings:
    if not call.kv or call.paged or _lacks_pages(call, limits):
        return
    if fall := _falls(call.kv):
        yield "actual_seq_lengths_kv", fall
    if call.latent and call.kv[-1] != call.latent.blocks:
        yield "actual_seq_lengths_kv", f"{_brief(call.kv)}: the last is {call.kv[-1]}, key has {call.latent.blocks}"


def same_size(call: FiaCall, limits: Limits) -> Findings:
    if call.ends and call.kv and len(call.ends) != len(call.kv):
        queries = call.name("actual_seq_lengths")
        yield "actual_seq_lengths_kv", f"{len(call.kv)} entries, {queries} has {len(call.ends)}"


def batch_size(call: FiaCall, limits: Limits) -> Findings:
    if call.ends and len(call.ends) > MAX_BATCH:
        yield "actual_seq_lengths", f"{len(call.ends)} entries"


def query_tokens(call: FiaCall, limits: Limits) -> Findings:
    most = MAX_QUERY_BYTES // BYTES.get(call.query.dtype, 2)
    if call.tokens is not None and call.tokens > most:
        yield "query", f"{call.query.dtype} with T = {call.tokens}, at most {most}"


def head_sizes(call: FiaCall, limits: Limits) -> Findings:
    if call.tokens is not None and call.query.shape[2] != LATENT:
        yield "query", f"{list(call.query.shape)}: head size {call.query.shape[2]}"
    for argument, part in (("key", call.key), ("value", call.value)):
        cache = call.dimensions(part)
        if cache and cache.head_size != LATENT:
            yield argument, f"{list(part.shape)}: head size {cache.head_size}"


def rope(call: FiaCall, limits: Limits) -> Findings:
    if call.query_rope is None:
        yield "query_rope", "None"
    elif call.query_rope.shape != (*call.query.shape[:-1], ROPE):
        yield "query_rope", f"{list(call.query_rope.shape)} beside a query {list(call.query.shape)}"
    if call.key_rope is None:
        yield "key_rope", "None"
    elif call.latent and call.dimensions(call.key_rope) != call.latent._replace(head_size=ROPE):
        yield "key_rope", f"{list(call.key_rope.shape)} beside a key {list(call.key.shape)}"


def query_heads(call: FiaCall, limits: Limits) -> Findings:
    if call.num_heads not in HEADS:
        yield "num_heads", str(call.num_heads)
    elif call.tokens is not None and call.query.shape[1] != call.num_heads:
        yield "num_heads", f"{call.num_heads}, query has {call.query.shape[1]}"


def kv_heads(call: FiaCall, limits: Limits) -> Findings:
    if call.num_key_value_heads == 0 and call.num_heads != 1:
        yield "num_key_value_heads", f"0, which means as many as {call.name('num_heads')}: {call.num_heads}"
    elif call.num_key_value_heads not in (0, 1):
        yield "num_key_value_heads", str(call.num_key_value_heads)
    if _lacks_pages(call, limits):
        return
    for argument, part in (("key", call.key), ("value", call.value)):
        cache = call.dimensions(part)
        if cache and cache.heads != 1:
            yield argument, f"{list(part.shape)}: {cache.heads} heads"


def layout(call: FiaCall, limits: Limits) -> Findings:
    if call.input_layout not in LAYOUTS:
        yield "input_layout", repr(call.input_layout)


def sparse_mode(call: FiaCall, limits: Limits) -> Findings:
    if call.sparse_mode not in (0, 3):
        yield "sparse_mode", str(call.sparse_mode)
    elif call.sparse_mode == 0 and call.atten_mask:
        yield "sparse_mode", "0, with a mask"
    elif call.sparse_mode == 3 and not call.atten_mask:
        yield "sparse_mode", "3, without a mask"


def mask_form(call: FiaCall, limits: Limits) -> Findings:
    mask = call.atten_mask
    if mask is None:
        return
    if not is_mask_shape(mask.shape):
        yield "atten_mask", f"shape {list(mask.shape)}"
    if mask.dtype not in MASK_DTYPES:
        yield "atten_mask", f"of {mask.dtype}"
    if mask.is_causal is False and is_mask_shape(mask.shape) and mask.dtype in MASK_DTYPES:
        yield "atten_mask", "another content"


def _block_size_allowed(call: FiaCall, limits: Limits) -> bool:
    return call.block_size in limits.block_sizes[call.kv_format]


def block_size(call: FiaCall, limits: Limits) -> Findings:
    if call.paged and not _block_size_allowed(call, limits):
        yield "block_size", f"{call.block_size}, cache in {call.kv_format} format"


def block_table(call: FiaCall, limits: Limits) -> Findings:
    table = call.block_table
    if table is None:
        return
    if table.dtype != "int32":
        yield "block_table", f"of {table.dtype}"
    if len(table.shape) != 2:
        yield "block_table", f"shape {list(table.shape)}"
    # Lists of different length do not tell the batch.
    elif call.ends and call.kv and len(call.ends) == len(call.kv) and table.shape[0] != len(call.ends):
        yield "block_table", f"shape {list(table.shape)}, {len(call.ends)} batch elements"


def block_table_columns(call: FiaCall, limits: Limits) -> Findings:
    table = call.block_table
    if table is None or len(table.shape) != 2 or not call.kv or not _block_size_allowed(call, limits):
        return
    columns, longest = table.shape[1], max(call.kv)
    usable = columns if table.usable_columns is None else min(columns, table.usable_columns)
    needed = -(-longest // call.block_size)
    if usable < needed:
        yield "block_table", f"{usable} columns, {longest} KV entries in blocks of {call.block_size} need {needed}"


def dtypes(call: FiaCall, limits: Limits) -> Findings:
    if call.query.dtype not in limits.dtypes:
        yield "query", f"of {call.query.dtype}"
    for argument in ("key", "value", "query_rope", "key_rope"):
        part = getattr(call, argument)
        if part and part.dtype != call.query.dtype:
            yield argument, f"of {part.dtype}, query is {call.query.dtype}"


def lse(call: FiaCall, limits: Limits) -> Findings:
    if call.softmax_lse_flag and call.version not in limits.lse:
        yield "softmax_lse_flag", f"{call.softmax_lse_flag} (version {call.version[1:]})"


def shapes(call: FiaCall, limits: Limits) -> Findings:
    if call.tokens is None:
        yield "query", f"shape {list(call.query.shape)}"
    if _lacks_pages(call, limits):
        return
    cache = f"{'' if call.paged else 'not '}paged, {call.kv_format} format"
    latent, value = call.latent, call.dimensions(call.value)
    if latent is None:
        yield "key", f"shape {list(call.key.shape)}, {cache}"
    if value is None:
        yield "value", f"shape {list(call.value.shape)}, {cache}"
    if not latent or not value:
        return
    # Heads and head sizes have rules of their own.
    if (value.blocks, value.block_size) != (latent.blocks, latent.block_size):
        yield "value", f"shape {list(call.value.shape)}, key is {list(call.key.shape)}"
    if call.paged and _block_size_allowed(call, limits) and call.block_size != latent.block_size:
        yield "block_size", f"{call.block_size}, blocks of key have {latent.block_size}"


def paging(call: FiaCall, limits: Limits) -> Findings:
    if _lacks_pages(call, limits):
        yield "block_table", "None"
