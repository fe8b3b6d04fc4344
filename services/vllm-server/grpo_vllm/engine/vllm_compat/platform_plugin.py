"""A vLLM platform plugin: on a CPU, adapters are computed by `vllm_compat.cpu_adapters`.

Only in the processes of our server: its routes refuse the adapters that this class cannot compute.
"""

from __future__ import annotations

import os

VARIABLE = "GRPO_VLLM_SERVER"
"""Environment variable that our server sets for its processes."""
CPU_ADAPTERS = "grpo_vllm.engine.vllm_compat.cpu_adapters.CpuAdapters"
_STOCK = "vllm.platforms.cpu.CpuPlatform"
_OURS = "grpo_vllm.engine.vllm_compat.cpu_platform.CpuPlatformWithAdapters"


def platform() -> str | None:
    """The class of our platform; None leaves the choice to vLLM, for example on a GPU."""
    if VARIABLE not in os.environ:
        return None
    from vllm.platforms import cpu_platform_plugin

    return _OURS if cpu_platform_plugin() == _STOCK else None
