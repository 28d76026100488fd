"""A call of `npu_fused_infer_attention_score` as plain data: what its rules look at, and no numbers of its tensors.

So a plan can be described where there is no torch, and a call where the operator's tensors are at hand.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, get_args

Version = Literal["v1", "v2"]
KvFormat = Literal["ND", "NZ"]
KV_FORMATS = get_args(KvFormat)
NZ_LANES = 16
"""Last dimension of a cache in NZ format, of 2-byte elements."""
OPERATORS = {"v1": "npu_fused_infer_attention_score", "v2": "npu_fused_infer_attention_score_v2"}
V2_NAMES = {
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
    "num_heads": "num_query_heads",
    "scale": "softmax_scale",
    "softmax_lse_flag": "return_softmax_lse",
}
"""Version 2's name of what version 1 calls otherwise."""
V1_NAMES = {new: old for old, new in V2_NAMES.items()}

_BOTH = """query key value pse_shift atten_mask block_table query_rope key_rope pre_tokens next_tokens input_layout
    num_key_value_heads sparse_mode inner_precise block_size"""
SCHEMA = {
    "v1": frozenset(
        f"""{_BOTH} actual_seq_lengths actual_seq_lengths_kv dequant_scale1 quant_scale1 dequant_scale2 quant_scale2
        quant_offset2 antiquant_scale antiquant_offset query_padding_size kv_padding_size key_antiquant_scale
        key_antiquant_offset value_antiquant_scale value_antiquant_offset key_shared_prefix value_shared_prefix
        actual_shared_prefix_len key_rope_antiquant_scale num_heads scale antiquant_mode softmax_lse_flag
        key_antiquant_mode value_antiquant_mode""".split()
    ),
    "v2": frozenset(
        f"""{_BOTH} actual_seq_qlen actual_seq_kvlen dequant_scale_query dequant_scale_key dequant_offset_key
        dequant_scale_value dequant_offset_value dequant_scale_key_rope quant_scale_out quant_offset_out quant_scale_p
        learnable_sink num_query_heads softmax_scale query_quant_mode key_quant_mode value_quant_mode return_softmax_lse
        query_dtype key_dtype value_dtype query_rope_dtype key_rope_dtype key_shared_prefix_dtype
        value_shared_prefix_dtype dequant_scale_query_dtype dequant_scale_key_dtype dequant_scale_value_dtype
        dequant_scale_key_rope_dtype out_dtype""".split()
    ),
}
"""Argument names of each version of the operator."""


class TensorLike(Protocol):
    """What a description takes from a tensor."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Shaped:
    """A tensor: its shape and its dtype, such as "bfloat16"."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Mask(Shaped):
    """A mask. is_causal: whether its content is that of sparse mode 3, None when nobody looked."""

    is_causal: bool | None = None


@dataclass(frozen=True, slots=True)
class BlockTable(Shaped):
    """A block table. usable_columns: how many blocks the row of the longest sequence really has, None for all."""

    usable_columns: int | None = None


@dataclass(frozen=True, slots=True)
class Foreign:
    """In place of a list of lengths: a value of another kind, such as "torch.Tensor"."""

    kind: str


class _Cache(NamedTuple):
    """Dimensions of a key or value. blocks: tokens where it is not paged; block_size: 0 there."""

    blocks: int
    heads: int
    block_size: int
    head_size: int


@dataclass(frozen=True)
class FiaCall:
    """One call of the operator, without the numbers in its tensors. Names and defaults are those of version 1.

    query [T, N, D], query_rope [T, N, 64].
    key and value: paged in ND format [blocks, block_size, D] or [blocks, 1, block_size, D], in NZ format
    [blocks, 1, D / 16, block_size, 16]; without a block table [KV tokens, 1, D]. key_rope: the same with 64 for D.
    actual_seq_lengths: prefix sums of the query tokens of each slot. actual_seq_lengths_kv: KV entries of each slot,
    or their prefix sums without a block table. Host lists, an entry a slot.
    kv_capacity: KV entries the cache holds, None for all its blocks. version: which operator is called; names: the
    arguments' names as they were written, when there was a call (`from_tensors`).
    Raises ValueError for a version or kv_format that does not exist.
    """

    query: Shaped
    key: Shaped
    value: Shaped
    actual_seq_lengths: Sequence[int] | Foreign | None = None
    actual_seq_lengths_kv: Sequence[int] | Foreign | None = None
    query_rope: Shaped | None = None
    key_rope: Shaped | None = None
    atten_mask: Mask | None = None
    block_table: BlockTable | None = None
    num_heads: int = 1
    num_key_value_heads: int = 0
    input_layout: str = "BSH"
    sparse_mode: int = 0
    block_size: int = 0
    softmax_lse_flag: bool = False
    kv_format: KvFormat = "ND"
    kv_capacity: int | None = None
    version: Version = "v1"
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.version not in OPERATORS:
            raise ValueError(f"version {self.version!r} is not one of {', '.join(OPERATORS)}")
        if self.kv_format not in KV_FORMATS:
            raise ValueError(f"kv_format {self.kv_format!r} is not one of {', '.join(KV_FORMATS)}")

    @classmethod
    def from_tensors(
        cls,
        query: TensorLike,
        key: TensorLike,
        value: TensorLike,
        *,
        version: Version = "v1",
        kv_format: KvFormat | None = None,
        kv_capacity: int | None = None,
        usable_columns: int | None = None,
        look_at_mask: bool = False,
        **arguments: Any,
    ) -> FiaCall:
        """From what the operator would get: its tensors and, under the names of `version`, its other arguments.

        kv_format: None for NZ when key has five dimensions. kv_capacity, usable_columns: as in `FiaCall` and
        `BlockTable`. look_at_mask: compare the mask's content, which waits for its device; else only the shared mask
        is known to be right. Arguments outside the rules (`scale`, quantisation) are checked by name alone.
        Raises no more than `FiaCall`: what is wrong with a call, names and kinds of lengths too, `check` tells.
        """
        get = functools.partial(_argument, arguments, version)
        return cls(
            query=_shaped(query),
            key=_shaped(key),
            value=_shaped(value),
            actual_seq_lengths=_lengths(get("actual_seq_lengths")),
            actual_seq_lengths_kv=_lengths(get("actual_seq_lengths_kv")),
            query_rope=_optional(get("query_rope")),
            key_rope=_optional(get("key_rope")),
            atten_mask=_mask(get("atten_mask"), look_at_mask),
            block_table=_table(get("block_table"), usable_columns),
            num_heads=get("num_heads", cls.num_heads),
            num_key_value_heads=get("num_key_value_heads", cls.num_key_value_heads),
            input_layout=get("input_layout", cls.input_layout),
            sparse_mode=get("sparse_mode", cls.sparse_mode),
            block_size=get("block_size", cls.block_size),
            softmax_lse_flag=get("softmax_lse_flag", cls.softmax_lse_flag),
            kv_format=kv_format or ("NZ" if len(key.shape) == 5 else "ND"),
            kv_capacity=kv_capacity,
            version=version,
            names=tuple(arguments),
        )

    def name(self, argument: str) -> str:
        """What this version of the operator calls an argument of version 1."""
        return V2_NAMES.get(argument, argument) if self.version == "v2" else argument

    @property
    def tokens(self) -> int | None:
        """T, None when query has not three dimensions."""
        return self.query.shape[0] if len(self.query.shape) == 3 else None

    @property
    def paged(self) -> bool:
        return self.block_table is not None

    @cached_property
    def ends(self) -> Sequence[int] | None:
        """The prefix sums of query tokens, None unless they are a host list with entries."""
        return _usable(self.actual_seq_lengths)

    @cached_property
    def segments(self) -> list[int] | None:
        """The query tokens of each slot, None where `ends` is or falls."""
        if self.ends is None:
            return None
        segments = list(map(operator.sub, self.ends, (0, *self.ends[:-1])))
        return segments if min(segments) >= 0 else None

    @cached_property
    def kv(self) -> Sequence[int] | None:
        """The KV lengths, None unless they are a host list with entries."""
        return _usable(self.actual_seq_lengths_kv)

    @cached_property
    def latent(self) -> _Cache | None:
        """The dimensions of key, None when they cannot be told apart."""
        return self.dimensions(self.key)

    def dimensions(self, part: Shaped) -> _Cache | None:
        """The dimensions of a key, value or key_rope in this call's format, None when they cannot be told apart."""
        match self.paged, self.kv_format, part.shape:
            case (True, "ND", (blocks, block_size, size)):
                return _Cache(blocks, 1, block_size, size)
            case (True, "ND", (blocks, heads, block_size, size)):
                return _Cache(blocks, heads, block_size, size)
            case (True, "NZ", (blocks, heads, rows, block_size, lanes)) if lanes == NZ_LANES:
                return _Cache(blocks, heads, block_size, rows * lanes)
            case (False, "ND", (tokens, heads, size)):
                return _Cache(tokens, heads, 0, size)
        return None


def _argument(arguments: dict[str, Any], version: Version, name: str, default: Any = None) -> Any:
    """An argument under its name in `version` or, so that the rule for names speaks alone, in the other one."""
    own, other = name, V2_NAMES.get(name, name)
    if version == "v2":
        own, other = other, own
    return arguments.get(own, arguments.get(other, default))


def _dtype(tensor: TensorLike) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shaped(tensor: TensorLike) -> Shaped:
    return Shaped(tuple(tensor.shape), _dtype(tensor))


def _optional(tensor: TensorLike | None) -> Shaped | None:
    return None if tensor is None else _shaped(tensor)


def _mask(tensor: TensorLike | None, look: bool) -> Mask | None:
    if tensor is None:
        return None
    # Here, not above: all but this works without torch.
    from mtp_runtime.attention.mask import is_causal, is_shared

    seen = is_causal(tensor) if look else is_shared(tensor) or None
    return Mask(tuple(tensor.shape), _dtype(tensor), seen)


def _table(tensor: TensorLike | None, usable_columns: int | None) -> BlockTable | None:
    return None if tensor is None else BlockTable(tuple(tensor.shape), _dtype(tensor), usable_columns)


def _lengths(values: Any) -> Sequence[int] | Foreign | None:
    """The list itself; of anything else only its kind, so that a description stays plain data."""
    return values if values is None or isinstance(values, list | tuple) else Foreign(kind(values))


def kind(value: object) -> str:
    """The name of its type, such as "torch.Tensor"."""
    module, name = type(value).__module__, type(value).__qualname__
    return name if module == "builtins" else f"{module}.{name}"


def _usable(values: Sequence[int] | Foreign | None) -> Sequence[int] | None:
    return values if isinstance(values, list | tuple) and values and odd_entry(values) is None else None


def odd_entry(values: Sequence[int]) -> tuple[int, str] | None:
    """The first entry that is no int64, and what is wrong with it."""
    low, high = -(2**63), 2**63 - 1
    # Whole-list built-ins: the usual case, a good list, is over in microseconds.
    if set(map(type, values)) <= {int} and (not values or (low <= min(values) and max(values) <= high)):
        return None
    for place, value in enumerate(values):
        # Exactly int: True is an int to Python, and a length to no one.
        if type(value) is not int:
            return place, f"{value!r} is a {kind(value)}"
        if not low <= value <= high:
            return place, f"{value} does not fit int64"
    return None
