"""Small blocks of the KV cache on a CPU, so that completions share more of their prompt.

vLLM shares whole blocks only, and its default of 128 tokens on a CPU is longer than many prompts.
Its kernels also compute blocks of 16 tokens, but its backend does not offer them.
"""

from __future__ import annotations

import argparse

import torch
from vllm.platforms import CpuArchEnum, current_platform

__all__ = ["offer_small_blocks", "smallest_block", "use_small_blocks"]

_BACKEND = "grpo_vllm.engine.vllm_compat.cpu_attention.SmallBlocks"
_SMALLEST = 16
_SMALLEST_EVERYWHERE = 32
"""Kernels of other processors, and the AMX kernel, need multiples of 32."""


def offer_small_blocks() -> None:
    """On a CPU, register the backend with vLLM. Each of vLLM's processes needs this."""
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        register_backend(AttentionBackendEnum.CPU_ATTN, _BACKEND)


def use_small_blocks(arguments: argparse.Namespace) -> None:
    """Make the smallest blocks the default. Args: arguments: vLLM's parsed options"""
    if arguments.block_size is None:
        arguments.block_size = smallest_block()


def smallest_block() -> int:
    """The smallest block that the kernels of this CPU compute, in tokens."""
    is_x86 = current_platform.get_cpu_architecture() == CpuArchEnum.X86
    has_amx = torch.cpu._is_amx_tile_supported()
    return _SMALLEST if is_x86 and not has_amx else _SMALLEST_EVERYWHERE
