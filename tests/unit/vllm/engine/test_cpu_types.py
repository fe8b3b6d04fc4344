from __future__ import annotations

import argparse
import platform
from pathlib import Path

import pytest

from grpo_core.process import cpu_types
from grpo_vllm.engine.vllm_compat.cpu_types import use_fast_type

OLD = "fpu sse2 avx2 avx512f"


@pytest.mark.parametrize(
    ("machine", "flags", "asked", "found"),
    [
        ("x86_64", OLD, "auto", "float32"),
        ("x86_64", OLD, "bfloat16", "bfloat16"),
        ("x86_64", f"{OLD} avx512_bf16", "auto", "auto"),
        ("x86_64", f"{OLD} amx_bf16", "auto", "auto"),
        ("aarch64", "fp asimd", "auto", "auto"),
    ],
)
def test_float32_is_the_default_where_bfloat16_is_slow(
    machine: str,
    flags: str,
    asked: str,
    found: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"model name\t: a CPU\nflags\t\t: {flags}\n\nflags\t\t: {flags}\n")
    monkeypatch.setattr(cpu_types, "CPUINFO", cpuinfo)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    arguments = argparse.Namespace(dtype=asked)
    use_fast_type(arguments)
    assert arguments.dtype == found
