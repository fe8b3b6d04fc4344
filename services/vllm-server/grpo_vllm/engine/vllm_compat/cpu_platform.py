"""vLLM's CPU platform, with the class that computes adapters replaced.

`grpo_vllm.engine.vllm_compat.platform_plugin` offers it to vLLM.
"""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform

from grpo_vllm.engine.vllm_compat.platform_plugin import CPU_ADAPTERS


class CpuPlatformWithAdapters(CpuPlatform):  # type: ignore[misc]
    @classmethod
    def get_punica_wrapper(cls) -> str:
        return CPU_ADAPTERS
