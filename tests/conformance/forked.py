"""Python programs that each need a fresh process of vLLM, from one process that has imported it already.

`python forked.py` imports what costs seconds, and then runs each program of a line of JSON on stdin in a fork. Nothing
is done before the fork that a program could notice: no plugin is loaded, no configuration is made.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


class Forks:
    """The process that forks. Use as a context manager."""

    def __enter__(self) -> Forks:
        # What it prints itself goes where nobody reads; a program's output goes to files.
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        return self

    def __exit__(self, *error: Any) -> None:
        self._process.communicate()
        self._log.close()

    def run(self, code: str, **env: str) -> subprocess.CompletedProcess[str]:
        """A program's end; env: on top of the environment."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps({"code": code, "env": env}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                found = json.loads(line.removeprefix(ANSWER))
                return subprocess.CompletedProcess([code], found["rc"], found["stdout"], found["stderr"])
        raise RuntimeError("the forking process ended")


ANSWER = "forked: "


def serve() -> None:
    """Answers every line of stdin; ends with it."""
    import vllm_ascend.ops  # noqa: F401

    for line in sys.stdin:
        asked = json.loads(line)
        with tempfile.TemporaryDirectory() as folder:
            files = {name: Path(folder) / name for name in ("stdout", "stderr")}
            child = os.fork()
            if child == 0:
                _program(asked, files)
            _, status = os.waitpid(child, 0)
            texts = {name: file.read_text(errors="replace") for name, file in files.items()}
        print(ANSWER + json.dumps({"rc": os.waitstatus_to_exitcode(status), **texts}), flush=True)


def _program(asked: dict[str, Any], files: dict[str, Path]) -> None:
    """Never returns."""
    rc = 1
    try:
        for number, file in enumerate(files.values(), 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
        os.environ.update(asked["env"])
        exec(asked["code"], {"__name__": "__main__"})
        rc = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(rc)


if __name__ == "__main__":
    serve()
