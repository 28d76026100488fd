"""The rendered router line of every cluster is one that the real router takes: built by it, not started.

The router lives in the engine environment, which `make test-unit` makes first.
"""

import json
import subprocess

import pytest

from mtp_runtime.config import api

SCRIPT = """
import json, sys
from vllm_router.launch_router import parse_router_args
from vllm_router.router import Router
from vllm_router.router_args import RouterArgs
parsed = parse_router_args(json.load(sys.stdin))
made = parsed if isinstance(parsed, RouterArgs) else RouterArgs.from_cli_args(parsed)
made._validate_router_args()
Router.from_args(made)
print(json.dumps([len(urls or []) for urls in (made.prefill_urls, made.decode_urls, made.worker_urls)]))
"""

# cluster -> prefill, decode and worker URLs
URLS = [
    ("a3", [4, 32, 0]),
    ("a3-single", [0, 0, 1]),
    ("a3-v31", [4, 32, 0]),
    ("a3-v32", [2, 8, 0]),
    ("lab", [1, 1, 0]),
    ("local", [1, 1, 0]),
    ("local-single", [0, 0, 1]),
    ("seed-online", [0, 0, 1]),
]


@pytest.mark.parametrize(("cluster", "urls"), URLS)
def test_the_router_takes_its_line(cluster: str, urls: list[int]) -> None:
    _, flag, module, *arguments = api.plan(cluster)["router"]["argv"]
    assert (flag, module) == ("-m", "vllm_router.launch_router")
    python = api.repository() / ".local" / "engine" / "bin" / "python"
    done = subprocess.run(
        [python, "-c", SCRIPT], input=json.dumps(arguments), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == urls
