"""Small blocks of the KV cache on a CPU, so that completions share more of their prompt.

vLLM shares whole blocks only, and its default of 128 tokens on a CPU is longer than many prompts.
Its kernels also compute blocks of 16 tokens, but its backend does not offer them.
"""

from __future__ import annotations

import argparse

import torch
from vllm.platforms import CpuArchEnum, current_platform
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

__all__ = ["offer_small_blocks", "use_small_blocks"]

SMALLEST = 16
SMALLEST_EVERYWHERE = 32
"""Kernels of other processors, and the AMX kernel, need multiples of 32."""


class SmallBlocks(CPUAttentionBackend):  # type: ignore[misc]
    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[int | MultipleOf]:
        del kv_cache_spec
        return [MultipleOf(_smallest())]


def offer_small_blocks() -> None:
    """Register the backend with vLLM, in each of its processes."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{SmallBlocks.__name__}")


def use_small_blocks(arguments: argparse.Namespace) -> None:
    """Make the smallest blocks the default. Args: arguments: vLLM's parsed options"""
    if arguments.block_size is None:
        arguments.block_size = _smallest()


def _smallest() -> int:
    is_x86 = current_platform.get_cpu_architecture() == CpuArchEnum.X86
    has_amx = torch.cpu._is_amx_tile_supported()  # type: ignore[no-untyped-call]
    return SMALLEST if is_x86 and not has_amx else SMALLEST_EVERYWHERE
