"""Finds out whether this CPU has instructions for bfloat16. Needs torch."""

from __future__ import annotations

INSTRUCTIONS = ("avx512_bf16", "amx_bf16")
SLOW = (
    "this CPU has no instructions for bfloat16, so it computes bfloat16 several times as slowly as "
    "float32"
)


def is_slow_in_bfloat16() -> bool:
    """Whether this is an x86 CPU without such instructions. Others were not measured."""
    import torch

    found = torch.cpu.get_capabilities()
    return found["architecture"] == "x86_64" and not any(map(found.get, INSTRUCTIONS))
