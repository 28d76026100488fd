"""A rank's configuration without a server: the keyword arguments of `LLM(...)`, the environment, and the program.

All of it comes from the rank's rendered command line and environment, so the two forms cannot drift apart. Some of it
has no place here, or another one:

* host, port: there is no server;
* kv_transfer_config, and the environment of the connectors: the process reads its prompts itself, nobody hands KV over;
* data_parallel_*: `LLM` takes one rank a process and reads its place from VLLM_DP_* (vLLM's own data-parallel example).
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from typing import Any

from .arguments import engine_arguments
from .engines import MOONCAKE_ENV, ROOT

SERVER_ONLY = ("host", "port")
HAND_OVER = ("kv_transfer_config",)
HAND_OVER_ENV = ("UCX_TLS", "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT", *MOONCAKE_ENV)
DATA_PARALLEL = {
    "data_parallel_size": "VLLM_DP_SIZE",
    "data_parallel_rank": "VLLM_DP_RANK",
    "data_parallel_address": "VLLM_DP_MASTER_IP",
    "data_parallel_rpc_port": "VLLM_DP_MASTER_PORT",
}
# Where the ranks meet that one process of the command line would start itself: they are on one host.
MEETING_POINT = {"VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": "13345"}
BOOK = "The book of Oakford for 14 days.\nDay 1. Rain fell on Oakford. Mira the baker"
PROMPTS = {
    # The shipped model writes such books, and nothing else.
    "vllm-cpu": [BOOK],
    "vllm-ascend": [
        "Hello, my name is",
        "The president of the United States is",
        "The capital of France is",
        "The future of AI is",
    ],
}
MAX_TOKENS = 16
# libnuma, which vLLM's extension for CPUs needs, where the machine lacks it.
LIBRARIES = f"{ROOT}/.local/deb/usr/lib/x86_64-linux-gnu"


@dataclass(frozen=True)
class Offline:
    """environment: before vLLM is imported; arguments: of `LLM(...)`; left_out: arguments and variables of the server.

    processes: how many of them make one data-parallel group on a host, each with its own number; 1 where the rank's
    place is in the environment already.
    """

    rank: str
    engine: str
    environment: dict[str, str]
    arguments: dict[str, Any]
    left_out: dict[str, Any]
    processes: int = 1


def decoding_rank(plan: dict[str, Any]) -> str:
    """The first rank that decodes: the one whose configuration people mean."""
    return str(next(rank["name"] for rank in plan["ranks"] if rank["role"] != "prefill"))


def offline(plan: dict[str, Any], name: str, root: str) -> Offline:
    """A rank of a plan without its server. root: the repository's folder. Errors: KeyError for an unknown rank."""
    rank = {one["name"]: one for one in plan["ranks"]}[name]
    arguments = {
        key: value.replace(ROOT, root) if isinstance(value, str) else value
        for key, value in engine_arguments(rank["argv"]).items()
    }
    environment = {key: value.replace(ROOT, root) for key, value in rank["env"].items()}
    left_out = {key: arguments.pop(key) for key in (*SERVER_ONLY, *HAND_OVER) if key in arguments}
    left_out |= {key: environment.pop(key) for key in HAND_OVER_ENV if key in environment}
    place = {DATA_PARALLEL[key]: str(arguments.pop(key)) for key in DATA_PARALLEL if key in arguments}
    processes = 1
    if place and "VLLM_DP_RANK" not in place:
        processes = int(place["VLLM_DP_SIZE"])
        place |= MEETING_POINT
    return Offline(name, plan["engine"], {**environment, **place}, arguments, left_out, processes)


def program(found: Offline, cluster: str, root: str) -> str:
    """The Python text: complete, to be run with the engine's own Python."""
    about = (
        f"Rank {found.rank} of {cluster} without a server, from its command line and environment (mtpctl render "
        f"{cluster}). Printed by mtpctl offline {cluster}: print it again rather than change it. Left out, for there "
        f"is neither a server nor a hand-over: {', '.join(found.left_out) or 'nothing'}."
    )
    lines = [
        *textwrap.wrap(about, 110, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False),
        f"# Run it: {_how_to_run(found, root)}",
        "",
        "import os",
        *(["import sys"] if found.processes > 1 else []),
        "",
        f"os.environ.update({_literal(found.environment, 0)})",
        *_place(found),
        "",
        "from vllm import LLM, SamplingParams  # noqa: E402 (it reads the environment when it is imported)",
        "",
        f"prompts = {_literal(PROMPTS[found.engine], 0)}",
        "",
        "",
        "def main() -> None:",
        f"    sampling_params = SamplingParams(max_tokens={MAX_TOKENS}, temperature=0)",
        "    llm = LLM(",
        *(f"        {key}={_literal(value, 8)}," for key, value in found.arguments.items()),
        "    )",
        "    for output in llm.generate(prompts, sampling_params):",
        '        print(f"Prompt: {output.prompt!r}, generated text: {output.outputs[0].text!r}")',
        "",
        "",
        'if __name__ == "__main__":',
        "    main()",
    ]
    return "\n".join(lines) + "\n"


def _how_to_run(found: Offline, root: str) -> str:
    if found.engine == "vllm-cpu":
        return f"LD_LIBRARY_PATH={LIBRARIES.replace(ROOT, root)} {root}/.local/engine/bin/python FILE"
    if found.processes > 1:
        return f"python FILE NUMBER, {found.processes} times at once with the numbers 0 to {found.processes - 1}."
    if "VLLM_DP_RANK" in found.environment:
        size = found.environment["VLLM_DP_SIZE"]
        return f"python FILE, on the rank's host, together with the other ranks of its group of {size}."
    return "python FILE, on the rank's host."


def _place(found: Offline) -> list[str]:
    """Which rank a process is, where one file serves all of a host's."""
    if found.processes == 1:
        return []
    tp = found.arguments.get("tensor_parallel_size", 1)
    return [
        "rank = int(sys.argv[1])",
        'os.environ["VLLM_DP_RANK"] = str(rank)',
        f'os.environ["ASCEND_RT_VISIBLE_DEVICES"] = ",".join(map(str, range(rank * {tp}, (rank + 1) * {tp})))',
    ]


def _literal(value: Any, indent: int) -> str:
    """A value as Python, containers over several lines."""
    inside, end = " " * (indent + 4), " " * indent
    if isinstance(value, dict) and value:
        rows = [f"{inside}{_text(str(key))}: {_literal(one, indent + 4)},\n" for key, one in value.items()]
        return "{\n" + "".join(rows) + end + "}"
    if isinstance(value, list) and any(isinstance(one, str | dict | list) for one in value):
        return "[\n" + "".join(f"{inside}{_literal(one, indent + 4)},\n" for one in value) + end + "]"
    return _text(value) if isinstance(value, str) else repr(value)


def _text(value: str) -> str:
    """A text in double quotes; JSON's escapes of printable text are Python's too."""
    return json.dumps(value, ensure_ascii=False)
