"""A vLLM platform plugin: on a CPU, adapters are computed by `vllm_compat.cpu_adapters`."""

from __future__ import annotations

_STOCK = "vllm.platforms.cpu.CpuPlatform"
_OURS = "grpo_vllm.engine.vllm_compat.cpu_platform.CpuPlatformWithAdapters"


def platform() -> str | None:
    """The class of our platform; None leaves the choice to vLLM, on other hardware than a plain
    CPU."""
    from vllm.platforms import cpu_platform_plugin

    return _OURS if cpu_platform_plugin() == _STOCK else None
