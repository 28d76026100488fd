"""A step whose graph can be exported, as plain data: what to ask the exporter for, without torch.

The exporter, `mtp_runtime.adapters.vllm_ascend.graph_export`, runs as a process of its own, with torch_npu.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from mtp_runtime.graphs.planner import Graph, plan

EXPORTER = "mtp_runtime.adapters.vllm_ascend.graph_export"
DECODE, DRAFT = "decode", "draft"
STEPS = (DECODE, DRAFT)
FILE = "dynamo.pbtxt"
"""What the exporter writes into its folder."""
MISSING = 3
"""Its exit code where a package is missing."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step at a full batch. heads: query heads of one rank; slots: of the graph, `requests` of them taken; kv: KV
    length of each request; dynamic: inputs whose first dimension is marked as one that changes.
    """

    heads: int
    slots: int
    requests: int
    k: int
    block_size: int
    kv: int = 4096
    kind: str = DECODE
    dynamic: tuple[str, ...] = ()

    def lengths(self) -> list[tuple[list[int], list[int]]]:
        """Both lists of each pass: the one over all K + 1 tokens, and, for a drafter, K - 1 over a token a slot."""
        width = self.k + 1
        first = plan([width] * self.requests, [self.kv] * self.requests, Graph(self.slots, width))
        passes = [(first.actual_seq_lengths, first.actual_seq_lengths_kv)]
        if self.kind == DRAFT:
            ends, free = list(range(1, self.slots + 1)), [0] * (self.slots - self.requests)
            passes += [(ends, [self.kv + depth] * self.requests + free) for depth in range(1, self.k)]
        return passes


def input_names(step: Step) -> tuple[str, ...]:
    """Names of the graph's inputs; the deeper passes' only for a drafter with K > 1."""
    deeper = ("deeper_query", "deeper_rope") if step.kind == DRAFT and step.k > 1 else ()
    return ("query", "query_rope", *deeper, "latent", "rope", "block_table", "attn_mask")


def words(step: Step, folder: Path) -> list[str]:
    """The exporter's command line, after the interpreter."""
    return ["-m", EXPORTER, json.dumps(asdict(step)), str(folder)]
