"""Plugin for vLLM on CPU, entry point groups `vllm.general_plugins` and `vllm.platform_plugins`, name `mtp_runtime`.

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


def platform() -> str | None:
    """The platform class for vLLM, or None where vLLM does not run on CPU or another platform plugin is installed."""
    from importlib.metadata import entry_points

    from vllm.platforms import cpu_platform_plugin

    others = [found.name for found in entry_points(group="vllm.platform_plugins") if found.name != "mtp_runtime"]
    if others or cpu_platform_plugin() is None:
        return None
    return "mtp_runtime.adapters.vllm_cpu.platform.MtpCpuPlatform"
