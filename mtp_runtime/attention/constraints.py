"""What `npu_fused_infer_attention_score` takes in TND layout for MLA decode (head size 512, rope 64).

The operator's meta function looks at the number of dimensions only: what else is wrong with a call shows on the device,
as a crash or as wrong numbers. Here every published rule is a value in `RULES`; `check` collects all that a call breaks
and `enforce` raises. A call is plain data (`FiaCall`): a plan can be checked where there is no torch.

A rule stays silent where another one has already refused what it would build on, so one fault is one violation.

Published rules changed over time. Without a CANN version the strictest one holds; `RELEASES` says what a version
relaxes. Never relaxed: 16 tokens a segment (gone from the documentation, still asserted by vllm-ascend 0.23), 4096
batch elements (the tiling check takes 65536), T (gone from the documentation, in the tiling check), sparse modes other
than 0 and 3 (documented later, of no use here). Not rules, though op-plugin 7.1.0 and 7.2.0 and the docstrings say
them: that KV must be paged, and for version 1 that query heads are 32, 64 or 128; documentation from 7.3.0 on takes
more. Not a rule at head size 512: as many KV entries as query tokens, so a slack slot (10 tokens, KV 0) passes.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

LATENT, ROPE = 512, 64
"""Head sizes."""
HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
LAYOUTS = ("TND", "TND_NTD")
LONGEST_SEGMENT = 16
MAX_BATCH = 4096
MAX_QUERY_BYTES = 2**20
"""T times the bytes of an element, whatever heads and head size are."""
MASK_SIZE = 2048
MASK_DTYPES = ("int8", "bool")
NZ_LANES = 16
"""Last dimension of a cache in NZ format, of 2-byte elements."""
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

SOURCES = {
    "D": "docstring of torch_npu 2.10.0.post4",
    "M": "its meta function",
    "T": "CANN's host tiling check, ops-transformer of 2025-10",
    "O": "op-plugin documentation, 7.1.0 to 26.1.0",
    "schema": "the operator's schema",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What depends on the CANN release or the engine.

    shortest: least tokens a segment. block_sizes: allowed ones by cache format. lse: operator versions that may return
    the log-sum-exp. dtypes: of query, key and value.
    """

    shortest: int
    block_sizes: dict[str, Sequence[int]]
    lse: tuple[str, ...]
    dtypes: tuple[str, ...] = ("bfloat16", "float16")


STRICT = Limits(shortest=1, block_sizes={"ND": (16, 128), "NZ": (128,)}, lse=())
# Documentation from op-plugin 7.3.0 on: no word on segments (0 is the tiling check's), no format in the rule for block
# sizes, and only version 1 still refuses the log-sum-exp.
RELAXED = Limits(
    shortest=0, block_sizes=dict.fromkeys(("ND", "NZ"), range(16, 1024 + 1, 16)), lse=("v2",), dtypes=STRICT.dtypes
)


@dataclass(frozen=True, slots=True)
class Release:
    """A line of CANN releases.

    first: the release that opened it; the line is every later one with the same first two numbers. op_plugin: the
    branch whose documentation describes it. certainty: how sure that is.
    """

    first: str
    op_plugin: str
    certainty: str
    limits: Limits


# Published: torch_npu's compatibility table (its branches v*-7.1.0 with CANN 8.2.RC1, and so on) and op-plugin's README
# (branch 7.1.0 with torch_npu's v*-7.1.0). A guess everywhere: that the kernels of a release do what its documentation
# says. The tiling check of 2025-10 lies between 8.3.RC1 and 8.5.0: that what it takes holds from 8.5.0 on is one too.
RELEASES = (
    Release("8.2.RC1", "7.1.0", "published; version 2 of the operator is not documented there", STRICT),
    Release("8.3.RC1", "7.2.0", "published", STRICT),
    Release("8.5.0", "7.3.0", "published; a guess for 8.5.1 and later", RELAXED),
    Release("9.0.0", "26.0.0", "published; a guess for 9.0.1 and later", RELAXED),
    Release("9.1.0", "26.1.0", "published, for 9.1.1 and later too", RELAXED),
)


def release_of(cann_version: str) -> Release:
    """The line of a CANN version such as "8.2.RC1" or "9.1.0". Raises ValueError when malformed or not known."""
    asked = _order(cann_version)
    for release in RELEASES:
        first = _order(release.first)
        if first[:2] == asked[:2] and first <= asked:
            return release
    known = ", ".join(release.first for release in RELEASES)
    raise ValueError(f"cann_version {cann_version!r} is not known; known are {known} and later ones of the same lines")


def _order(version: str) -> tuple[int, int, bool, int]:
    found = re.fullmatch(r"([0-9]+)\.([0-9]+)\.(RC)?([0-9]+)", version) if isinstance(version, str) else None
    if found is None:
        raise ValueError(f"cann_version {version!r} is malformed; it is written like 8.2.RC1 or 9.1.0")
    major, minor, candidate, last = found.groups()
    return int(major), int(minor), candidate is None, int(last)


@functools.lru_cache
def limits_of(cann_version: str | None = None, engine: str = "ascend") -> Limits:
    """The limits for a CANN version (None: the strictest) and an engine ("ascend" or "cpu"). Raises ValueError."""
    limits = STRICT if cann_version is None else release_of(cann_version).limits
    if engine == "ascend":
        return limits
    if engine == "cpu":
        return replace(limits, dtypes=(*limits.dtypes, "float32"))
    raise ValueError(f"engine {engine!r} is not known; known are ascend and cpu")


Version = Literal["v1", "v2"]
OPERATORS = {"v1": "npu_fused_infer_attention_score", "v2": "npu_fused_infer_attention_score_v2"}
V2_NAMES = {
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
    "num_heads": "num_query_heads",
    "scale": "softmax_scale",
    "softmax_lse_flag": "return_softmax_lse",
}
"""Version 2's name of what version 1 calls otherwise."""
_V1_NAMES = {new: old for old, new in V2_NAMES.items()}

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
    kv_format: Literal["ND", "NZ"] = "ND"
    kv_capacity: int | None = None
    version: Version = "v1"
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.version not in OPERATORS:
            raise ValueError(f"version {self.version!r} is not one of {', '.join(OPERATORS)}")
        if self.kv_format not in STRICT.block_sizes:
            raise ValueError(f"kv_format {self.kv_format!r} is not one of {', '.join(STRICT.block_sizes)}")

    @classmethod
    def from_tensors(
        cls,
        query: TensorLike,
        key: TensorLike,
        value: TensorLike,
        *,
        version: Version = "v1",
        kv_format: Literal["ND", "NZ"] | None = None,
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
    return values if values is None or isinstance(values, list | tuple) else Foreign(_kind(values))


def _kind(value: object) -> str:
    module, name = type(value).__module__, type(value).__qualname__
    return name if module == "builtins" else f"{module}.{name}"


def _usable(values: Sequence[int] | Foreign | None) -> Sequence[int] | None:
    return values if isinstance(values, list | tuple) and values and _odd_entry(values) is None else None


def _odd_entry(values: Sequence[int]) -> tuple[int, str] | None:
    """The first entry that is no int64, and what is wrong with it."""
    low, high = -(2**63), 2**63 - 1
    # Whole-list built-ins: the usual case, a good list, is over in microseconds.
    if set(map(type, values)) <= {int} and (not values or (low <= min(values) and max(values) <= high)):
        return None
    for place, value in enumerate(values):
        # Exactly int: True is an int to Python, and a length to no one.
        if type(value) is not int:
            return place, f"{value!r} is a {_kind(value)}"
        if not low <= value <= high:
            return place, f"{value} does not fit int64"
    return None


def _brief(values: Sequence[int]) -> str:
    """A list, its middle left out where it is long."""
    if len(values) <= 8:
        return str(list(values))
    return f"[{', '.join(map(str, values[:4]))}, ..., {', '.join(map(str, values[-3:]))}]"


Findings = Iterator[tuple[str, str]]
"""What breaks a rule: argument (version 1's name) and its value."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. argument: what it is about in the first place (version 1's name); text: what must hold; source: keys of
    `SOURCES`; check: finds what breaks it."""

    id: str
    argument: str
    text: str
    source: tuple[str, ...]
    check: Callable[[FiaCall, Limits], Findings]


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that a call breaks. argument: by the name of the operator's version; value: what it is; rule: what must
    hold; source: keys of `SOURCES`."""

    id: str
    argument: str
    value: str
    rule: str
    source: tuple[str, ...]

    def __str__(self) -> str:
        source = "; ".join(f"{key}: {SOURCES[key]}" for key in self.source)
        return f"{self.argument} = {self.value}. Rule {self.id}: {self.rule} (source {source})"


class FiaConstraintError(ValueError):
    """A call that the operator must not get. violations: all that is wrong with it."""

    def __init__(self, call: FiaCall, violations: list[Violation]) -> None:
        self.violations = violations
        super().__init__("\n  ".join((f"{OPERATORS[call.version]} would not take this call:", *map(str, violations))))


def check(call: FiaCall, *, cann_version: str | None = None, engine: str = "ascend") -> list[Violation]:
    """Every rule that a call breaks, in the order of `RULES`; linear in the number of slots.

    cann_version: "8.2.RC1", "9.1.0", ...; None takes the strictest published rule. engine: "cpu" takes float32 too.
    Raises ValueError for a version or engine that is not known. Source: fia_tnd_constraints.
    """
    limits = limits_of(cann_version, engine)
    return [
        Violation(rule.id, call.name(argument), value, rule.text, rule.source)
        for rule in RULES
        for argument, value in rule.check(call, limits)
    ]


def enforce(call: FiaCall, *, cann_version: str | None = None, engine: str = "ascend") -> None:
    """Raises FiaConstraintError with everything that `check` finds, if anything."""
    violations = check(call, cann_version=cann_version, engine=engine)
    if violations:
        raise FiaConstraintError(call, violations)


def is_mask_shape(shape: tuple[int, ...]) -> bool:
    """Whether a mask of sparse mode 3 may have this shape: [2048, 2048], or with one or two 1s before it."""
    return shape[-2:] == (MASK_SIZE, MASK_SIZE) and shape[:-2] in ((), (1,), (1, 1))


def _names(call: FiaCall, limits: Limits) -> Findings:
    for written in call.names:
        if written not in SCHEMA[call.version]:
            name = _V1_NAMES.get(written, written)
            yield name, f"given as {written}" if call.name(name) != written else "given"


def _both_lists(call: FiaCall) -> Iterator[tuple[str, Any, Sequence[int] | None]]:
    """Argument, value and, unless it is something else, the list with entries."""
    yield "actual_seq_lengths", call.actual_seq_lengths, call.ends
    yield "actual_seq_lengths_kv", call.actual_seq_lengths_kv, call.kv


def _host_lists(call: FiaCall, limits: Limits) -> Findings:
    for argument, values, usable in _both_lists(call):
        if usable or values is None:
            continue
        if not isinstance(values, list | tuple):
            yield argument, f"a {values.kind if isinstance(values, Foreign) else _kind(values)}"
        elif odd := _odd_entry(values):
            yield argument, f"a list whose entry {odd[0]}, {odd[1]}"


def _given(call: FiaCall, limits: Limits) -> Findings:
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


def _prefix_sums(call: FiaCall, limits: Limits) -> Findings:
    if call.ends and call.segments is None and (fall := _falls(call.ends)):
        yield "actual_seq_lengths", fall


def _last_is_t(call: FiaCall, limits: Limits) -> Findings:
    if call.ends and call.tokens not in (None, call.ends[-1]):
        yield "actual_seq_lengths", f"{_brief(call.ends)}: the last is {call.ends[-1]}, T is {call.tokens}"


def _segments(call: FiaCall, limits: Limits) -> Findings:
    ends, segments = call.ends, call.segments
    if not ends or not segments or (limits.shortest <= min(segments) and max(segments) <= LONGEST_SEGMENT):
        return
    wrong = [i for i, tokens in enumerate(segments) if not limits.shortest <= tokens <= LONGEST_SEGMENT]
    more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    yield "actual_seq_lengths", f"{_brief(ends)}: {segments[wrong[0]]} tokens in segment {wrong[0]}{more}"


def _kv_paged(call: FiaCall, limits: Limits) -> Findings:
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


def _kv_not_paged(call: FiaCall, limits: Limits) -> Findings:
    if not call.kv or call.paged:
        return
    if fall := _falls(call.kv):
        yield "actual_seq_lengths_kv", fall
    if call.latent and call.kv[-1] != call.latent.blocks:
        yield "actual_seq_lengths_kv", f"{_brief(call.kv)}: the last is {call.kv[-1]}, key has {call.latent.blocks}"


def _same_size(call: FiaCall, limits: Limits) -> Findings:
    if call.ends and call.kv and len(call.ends) != len(call.kv):
        queries = call.name("actual_seq_lengths")
        yield "actual_seq_lengths_kv", f"{len(call.kv)} entries, {queries} has {len(call.ends)}"


def _batch(call: FiaCall, limits: Limits) -> Findings:
    if call.ends and len(call.ends) > MAX_BATCH:
        yield "actual_seq_lengths", f"{len(call.ends)} entries"


def _tokens(call: FiaCall, limits: Limits) -> Findings:
    most = MAX_QUERY_BYTES // BYTES.get(call.query.dtype, 2)
    if call.tokens is not None and call.tokens > most:
        yield "query", f"{call.query.dtype} with T = {call.tokens}, at most {most}"


def _head_sizes(call: FiaCall, limits: Limits) -> Findings:
    if call.tokens is not None and call.query.shape[2] != LATENT:
        yield "query", f"{list(call.query.shape)}: head size {call.query.shape[2]}"
    for argument, part in (("key", call.key), ("value", call.value)):
        cache = call.dimensions(part)
        if cache and cache.head_size != LATENT:
            yield argument, f"{list(part.shape)}: head size {cache.head_size}"


def _rope(call: FiaCall, limits: Limits) -> Findings:
    if call.query_rope is None:
        yield "query_rope", "None"
    elif call.query_rope.shape != (*call.query.shape[:-1], ROPE):
        yield "query_rope", f"{list(call.query_rope.shape)} beside a query {list(call.query.shape)}"
    if call.key_rope is None:
        yield "key_rope", "None"
    elif call.latent and call.dimensions(call.key_rope) != call.latent._replace(head_size=ROPE):
        yield "key_rope", f"{list(call.key_rope.shape)} beside a key {list(call.key.shape)}"


def _query_heads(call: FiaCall, limits: Limits) -> Findings:
    if call.num_heads not in HEADS:
        yield "num_heads", str(call.num_heads)
    elif call.tokens is not None and call.query.shape[1] != call.num_heads:
        yield "num_heads", f"{call.num_heads}, query has {call.query.shape[1]}"


def _kv_heads(call: FiaCall, limits: Limits) -> Findings:
    if call.num_key_value_heads == 0 and call.num_heads != 1:
        yield "num_key_value_heads", f"0, which means as many as {call.name('num_heads')}: {call.num_heads}"
    elif call.num_key_value_heads not in (0, 1):
        yield "num_key_value_heads", str(call.num_key_value_heads)
    for argument, part in (("key", call.key), ("value", call.value)):
        cache = call.dimensions(part)
        if cache and cache.heads != 1:
            yield argument, f"{list(part.shape)}: {cache.heads} heads"


def _layout(call: FiaCall, limits: Limits) -> Findings:
    if call.input_layout not in LAYOUTS:
        yield "input_layout", repr(call.input_layout)


def _sparse_mode(call: FiaCall, limits: Limits) -> Findings:
    if call.sparse_mode not in (0, 3):
        yield "sparse_mode", str(call.sparse_mode)
    elif call.sparse_mode == 0 and call.atten_mask:
        yield "sparse_mode", "0, with a mask"
    elif call.sparse_mode == 3 and not call.atten_mask:
        yield "sparse_mode", "3, without a mask"


def _mask_form(call: FiaCall, limits: Limits) -> Findings:
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


def _block_size(call: FiaCall, limits: Limits) -> Findings:
    if call.paged and not _block_size_allowed(call, limits):
        yield "block_size", f"{call.block_size}, cache in {call.kv_format} format"


def _block_table(call: FiaCall, limits: Limits) -> Findings:
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


def _block_table_columns(call: FiaCall, limits: Limits) -> Findings:
    table = call.block_table
    if table is None or len(table.shape) != 2 or not call.kv or not _block_size_allowed(call, limits):
        return
    columns, longest = table.shape[1], max(call.kv)
    usable = columns if table.usable_columns is None else min(columns, table.usable_columns)
    needed = -(-longest // call.block_size)
    if usable < needed:
        yield "block_table", f"{usable} columns, {longest} KV entries in blocks of {call.block_size} need {needed}"


def _dtypes(call: FiaCall, limits: Limits) -> Findings:
    if call.query.dtype not in limits.dtypes:
        yield "query", f"of {call.query.dtype}"
    for argument in ("key", "value", "query_rope", "key_rope"):
        part = getattr(call, argument)
        if part and part.dtype != call.query.dtype:
            yield argument, f"of {part.dtype}, query is {call.query.dtype}"


def _lse(call: FiaCall, limits: Limits) -> Findings:
    if call.softmax_lse_flag and call.version not in limits.lse:
        yield "softmax_lse_flag", f"{call.softmax_lse_flag} (version {call.version[1:]})"


def _shapes(call: FiaCall, limits: Limits) -> Findings:
    if call.tokens is None:
        yield "query", f"shape {list(call.query.shape)}"
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


RULES = (
    Rule(
        "F01",
        "arguments",
        "arguments have the names of the operator's version (version 1: actual_seq_lengths, actual_seq_lengths_kv, "
        "num_heads, scale, softmax_lse_flag; version 2: actual_seq_qlen, actual_seq_kvlen, num_query_heads, "
        "softmax_scale, return_softmax_lse)",
        ("schema",),
        _names,
    ),
    Rule(
        "F02",
        "actual_seq_lengths",
        "lengths are host lists of int64: ints, in a list or tuple, neither a tensor nor an array nor bools",
        ("schema", "D"),
        _host_lists,
    ),
    Rule("F03", "actual_seq_lengths", "both lists of lengths are given, an entry a batch element", ("D",), _given),
    Rule(
        "F04",
        "actual_seq_lengths",
        "query lengths are prefix sums, which neither fall nor are negative",
        ("D",),
        _prefix_sums,
    ),
    Rule("F05", "actual_seq_lengths", "the last prefix sum of query lengths equals T", ("T",), _last_is_t),
    Rule(
        "F06",
        "actual_seq_lengths",
        "one segment has 1..16 query tokens, 0..16 from CANN 8.5.0 on",
        ("D", "T", "O"),
        _segments,
    ),
    Rule("F07", "actual_seq_lengths_kv", "paged: each KV length is in 0..KV capacity", ("D", "T"), _kv_paged),
    Rule(
        "F08",
        "actual_seq_lengths_kv",
        "not paged: KV lengths are prefix sums, which neither fall nor are negative, and the last is key's tokens",
        ("D", "T"),
        _kv_not_paged,
    ),
    Rule("F09", "actual_seq_lengths_kv", "both lists of lengths have an entry a batch element", ("T",), _same_size),
    Rule("F10", "actual_seq_lengths", "at most 4096 batch elements", ("D", "O", "T"), _batch),
    Rule("F11", "query", "T is at most 1 MiB / bytes of an element, 524288 for bf16", ("D", "T"), _tokens),
    Rule("F12", "query", "head size of query, key and value is 512", ("D", "T"), _head_sizes),
    Rule(
        "F13",
        "query_rope",
        "both rope tensors are given, with head size 64 and else the shape of query and of key",
        ("D", "T"),
        _rope,
    ),
    Rule("F14", "num_heads", "query heads are 1, 2, 4, 8, 16, 32, 64 or 128, as in query", ("D", "T"), _query_heads),
    Rule("F15", "num_key_value_heads", "KV heads are 1", ("D", "T"), _kv_heads),
    Rule("F16", "input_layout", "the layout is TND or TND_NTD", ("D", "T"), _layout),
    Rule("F17", "sparse_mode", "sparse mode is 0 without a mask or 3 with one", ("D", "T"), _sparse_mode),
    Rule(
        "F18",
        "atten_mask",
        "the mask is [2048, 2048], or with one or two 1s before it, int8 or bool, ones strictly above the diagonal",
        ("D", "T"),
        _mask_form,
    ),
    Rule(
        "F19",
        "block_size",
        "block size is 16 or 128 in ND format, 128 in NZ; from CANN 8.5.0 on a multiple of 16 up to 1024",
        ("T", "O"),
        _block_size,
    ),
    Rule("F20", "block_table", "the block table is int32, 2-D, a row a batch element", ("D", "T"), _block_table),
    Rule(
        "F21",
        "block_table",
        "the block table has a column for each block of the longest sequence",
        ("D", "T"),
        _block_table_columns,
    ),
    Rule("F22", "query", "query is bf16 or fp16; key, value and rope are the same", ("T", "D"), _dtypes),
    Rule(
        "F23",
        "softmax_lse_flag",
        "no log-sum-exp; version 2 may return it from CANN 8.5.0 on",
        ("T", "O"),
        _lse,
    ),
    Rule(
        "F24",
        "key",
        "query is [T, N, D]; key and value are alike: [blocks, block size, D] or [blocks, 1, block size, D] in ND "
        "format, [blocks, 1, D / 16, block size, 16] in NZ, [tokens, 1, D] when not paged",
        ("M", "T"),
        _shapes,
    ),
)
"""Every rule of MLA decode in TND layout; in this order violations are told."""
