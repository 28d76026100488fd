"""Plugin for vLLM on CPU, entry point group `vllm.general_plugins`, name `mtp_runtime`.

Imports nothing but the standard library: vLLM logs and swallows an ImportError of a plugin module, while what
`register` raises ends the process. So everything that can fail lives inside `register`.
"""

from __future__ import annotations


def register() -> None:
    """Put our verification and our decode attention in the place of vLLM's, in this process.

    Called by vLLM in every process, more than once in some. Raises RuntimeError where anything is missing: a server
    must not start without them.
    """
    try:
        from mtp_runtime.adapters.vllm_cpu.install import install

        install()
    except Exception as error:
        raise RuntimeError(f"mtp_runtime plugin: registration failed, refusing to serve without it: {error}") from error
