"""Exports the drafter's passes under the torchair options: python export_options.py FOLDER STEP SPARSE(0 or 1)"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mtp_runtime.adapters.vllm_ascend.graph_export import example, export, module
from mtp_runtime.adapters.vllm_ascend.torchair_options import TorchairOptions, set_compile_mode
from mtp_runtime.graphs.exported_step import Step

if __name__ == "__main__":
    step, options = Step(**json.loads(sys.argv[2])), TorchairOptions(sparse=sys.argv[3] == "1")
    set_compile_mode(options)
    export(module(step), example(step), Path(sys.argv[1]), options=options)
