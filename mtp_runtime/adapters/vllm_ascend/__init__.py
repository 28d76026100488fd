"""Plugin for vllm-ascend, entry point group `vllm.general_plugins`, name `mtp_runtime_ascend`.

Imports nothing but the standard library: vLLM logs and swallows an ImportError of a plugin module, while what
`register` raises ends the process. So everything that can fail lives inside `register`.
"""

from __future__ import annotations


def register() -> None:
    """Wait for an engine with MTP on an NPU; elsewhere do nothing.

    Called by vLLM in every process, more than once in some. Raises RuntimeError where a patch cannot be applied: a
    server must not start half patched.
    """
    try:
        from mtp_runtime.adapters.vllm_ascend.install import install

        install()
    except Exception as error:
        raise RuntimeError(f"mtp_runtime_ascend plugin: refusing to serve without it: {error}") from error
