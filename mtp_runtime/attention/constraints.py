"""What `npu_fused_infer_attention_score` takes in TND layout for MLA decode (head size 512, rope 64).

The operator's meta function looks at the number of dimensions only: what else is wrong with a call shows on the device,
as a crash or as wrong numbers. Here every published rule is a value in `RULES`; `check` collects all that a call breaks
and `enforce` raises. A call is plain data (`FiaCall`): a plan can be checked where there is no torch.

A rule stays silent where another one has already refused what it would build on, so one fault is one violation.

Published rules changed over time. Without a CANN version the strictest one holds; `cann.RELEASES` says what a version
relaxes. Never relaxed: 16 tokens a segment (gone from the documentation, still asserted by vllm-ascend 0.23), 4096
batch elements (the tiling check takes 65536), T (gone from the documentation, in the tiling check), sparse modes other
than 0 and 3 (documented later, of no use here). Not a rule at head size 512: as many KV entries as query tokens, so a
slack slot (10 tokens, KV 0) passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mtp_runtime.attention import findings
from mtp_runtime.attention.call import OPERATORS, FiaCall
from mtp_runtime.attention.cann import Limits, limits_of
from mtp_runtime.attention.findings import Findings

SOURCES = {
    "D": "docstring of torch_npu 2.10.0.post4",
    "M": "its meta function",
    "T": "CANN's host tiling check, ops-transformer of 2025-10",
    "O": "op-plugin documentation, 7.1.0 to 26.1.0",
    "schema": "the operator's schema",
}


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


RULES = (
    Rule(
        "F01",
        "arguments",
        "arguments have the names of the operator's version (version 1: actual_seq_lengths, actual_seq_lengths_kv, "
        "num_heads, scale, softmax_lse_flag; version 2: actual_seq_qlen, actual_seq_kvlen, num_query_heads, "
        "softmax_scale, return_softmax_lse)",
        ("schema",),
        findings.argument_names,
    ),
    Rule(
        "F02",
        "actual_seq_lengths",
        "lengths are host lists of int64: ints, in a list or tuple, neither a tensor nor an array nor bools",
        ("schema", "D"),
        findings.host_lists,
    ),
    Rule(
        "F03", "actual_seq_lengths", "both lists of lengths are given, an entry a batch element", ("D",), findings.given
    ),
    Rule(
        "F04",
        "actual_seq_lengths",
        "query lengths are prefix sums, which neither fall nor are negative",
        ("D",),
        findings.prefix_sums,
    ),
    Rule("F05", "actual_seq_lengths", "the last prefix sum of query lengths equals T", ("T",), findings.last_is_t),
    Rule(
        "F06",
        "actual_seq_lengths",
        "one segment has 1..16 query tokens, 0..16 from CANN 8.5.0 on",
        ("D", "T", "O"),
        findings.segment_lengths,
    ),
    Rule("F07", "actual_seq_lengths_kv", "paged: each KV length is in 0..KV capacity", ("D", "T"), findings.kv_paged),
    Rule(
        "F08",
        "actual_seq_lengths_kv",
        "not paged: KV lengths are prefix sums, which neither fall nor are negative, and the last is key's tokens",
        ("D", "T"),
        findings.kv_not_paged,
    ),
    Rule(
        "F09",
        "actual_seq_lengths_kv",
        "both lists of lengths have an entry a batch element",
        ("T",),
        findings.same_size,
    ),
    Rule("F10", "actual_seq_lengths", "at most 4096 batch elements", ("D", "O", "T"), findings.batch_size),
    Rule(
        "F11", "query", "T is at most 1 MiB / bytes of an element, 524288 for bf16", ("D", "T"), findings.query_tokens
    ),
    Rule("F12", "query", "head size of query, key and value is 512", ("D", "T"), findings.head_sizes),
    Rule(
        "F13",
        "query_rope",
        "both rope tensors are given, with head size 64 and else the shape of query and of key",
        ("D", "T"),
        findings.rope,
    ),
    Rule(
        "F14",
        "num_heads",
        "query heads are 1, 2, 4, 8, 16, 32, 64 or 128, as in query",
        ("D", "T"),
        findings.query_heads,
    ),
    Rule("F15", "num_key_value_heads", "KV heads are 1", ("D", "T"), findings.kv_heads),
    Rule("F16", "input_layout", "the layout is TND or TND_NTD", ("D", "T"), findings.layout),
    Rule("F17", "sparse_mode", "sparse mode is 0 without a mask or 3 with one", ("D", "T"), findings.sparse_mode),
    Rule(
        "F18",
        "atten_mask",
        "the mask is [2048, 2048], or with one or two 1s before it, int8 or bool, ones strictly above the diagonal",
        ("D", "T"),
        findings.mask_form,
    ),
    Rule(
        "F19",
        "block_size",
        "block size is 16 or 128 in ND format, 128 in NZ; from CANN 8.5.0 on a multiple of 16 up to 1024",
        ("T", "O"),
        findings.block_size,
    ),
    Rule(
        "F20", "block_table", "the block table is int32, 2-D, a row a batch element", ("D", "T"), findings.block_table
    ),
    Rule(
        "F21",
        "block_table",
        "the block table has a column for each block of the longest sequence",
        ("D", "T"),
        findings.block_table_columns,
    ),
    Rule("F22", "query", "query is bf16 or fp16; key, value and rope are the same", ("T", "D"), findings.dtypes),
    Rule(
        "F23",
        "softmax_lse_flag",
        "no log-sum-exp; version 2 may return it from CANN 8.5.0 on",
        ("T", "O"),
        findings.lse,
    ),
    Rule(
        "F24",
        "key",
        "query is [T, N, D]; key and value are alike: [blocks, block size, D] or [blocks, 1, block size, D] in ND "
        "format, [blocks, 1, D / 16, block size, 16] in NZ, [tokens, 1, D] when not paged",
        ("M", "T"),
        findings.shapes,
    ),
    Rule("F25", "block_table", "KV is paged; it need not be from CANN 8.5.0 on", ("D", "O"), findings.paging),
)
"""Every rule of MLA decode in TND layout; in this order violations are told."""
