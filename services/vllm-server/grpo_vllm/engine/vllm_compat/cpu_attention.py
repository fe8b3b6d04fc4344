"""vLLM's attention for a CPU, which also offers the small blocks that its kernels compute."""

from __future__ import annotations

from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from grpo_vllm.engine.vllm_compat.cpu_blocks import smallest_block


class SmallBlocks(CPUAttentionBackend):  # type: ignore[misc]
    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[int | MultipleOf]:
        del kv_cache_spec
        return [MultipleOf(smallest_block())]
