from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

from grpo_vllm.engine.vllm_compat.cpu_types import use_fast_type

OLD = {"architecture": "x86_64", "avx2": True, "avx512_f": True}
ZEN_4 = OLD | {"avx512_bf16": True}
SAPPHIRE_RAPIDS = OLD | {"avx512_bf16": False, "amx_bf16": True}


@pytest.mark.parametrize(
    ("cpu", "asked", "found"),
    [
        (OLD, "auto", "float32"),
        (OLD, "bfloat16", "bfloat16"),
        (ZEN_4, "auto", "auto"),
        (SAPPHIRE_RAPIDS, "auto", "auto"),
        ({"architecture": "aarch64"}, "auto", "auto"),
    ],
)
def test_float32_is_the_default_where_bfloat16_is_slow(
    cpu: dict[str, Any], asked: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu)
    arguments = argparse.Namespace(dtype=asked)
    use_fast_type(arguments)
    assert arguments.dtype == found
