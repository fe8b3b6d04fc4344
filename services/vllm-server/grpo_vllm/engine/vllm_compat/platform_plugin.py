"""A vLLM platform plugin: on a CPU, adapters are computed by `vllm_compat.cpu`.

Only in the processes of our server: its routes refuse the adapters that this class cannot compute.
It also removes what several workers would leave in /dev/shm.
vLLM imports this module while it chooses the platform, so nothing here may need one.
"""

from __future__ import annotations

import os

from vllm.platforms import cpu_platform_plugin
from vllm.platforms.cpu import CpuPlatform

from grpo_vllm.engine.vllm_compat import SERVER_VARIABLE

CPU_ADAPTERS = "grpo_vllm.engine.vllm_compat.cpu.CpuAdapters"
CPU_WORKERS = "grpo_vllm.engine.vllm_compat.cpu.WorkerGroup"
_STOCK = "vllm.platforms.cpu.CpuPlatform"
_OURS = f"{__name__}.CpuPlatformWithAdapters"


class CpuPlatformWithAdapters(CpuPlatform):  # type: ignore[misc]
    @classmethod
    def get_punica_wrapper(cls) -> str:
        return CPU_ADAPTERS

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return CPU_WORKERS


def platform() -> str | None:
    """The class of our platform; None leaves the choice to vLLM, for example on a GPU."""
    if SERVER_VARIABLE not in os.environ:
        return None
    return _OURS if cpu_platform_plugin() == _STOCK else None
