"""Options that reach vLLM changed, unchanged or not at all."""

from __future__ import annotations

import platform
from pathlib import Path
from types import ModuleType

import pytest

from grpo_core import cpu

# vLLM's modules warn when they are first imported, which may be here.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

OLD = "fpu sse2 avx2 avx512f"


@pytest.fixture
def args() -> ModuleType:
    from grpo_vllm.engine import args

    return args


@pytest.mark.parametrize(
    "option",
    [
        ("--ssl-keyfile", "k.pem"),
        ("--api-server-count", "3"),
        ("--lora-modules", "a=/x"),
        ("--uds", "/tmp/socket"),
        ("--headless",),
    ],
)
def test_options_without_effect_are_refused_by_name(
    args: ModuleType, option: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit, match=rf"no effect here; remove them: {option[0]} \("):
        args.refuse_ignored_options(args.parse_engine_arguments(["--model", "m", *option]))


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
    args: ModuleType,
    machine: str,
    flags: str,
    asked: str,
    found: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"model name\t: a CPU\nflags\t\t: {flags}\n\nflags\t\t: {flags}\n")
    monkeypatch.setattr(cpu, "CPUINFO", cpuinfo)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    arguments = args.parse_engine_arguments(["--model", "m", "--dtype", asked])
    args.adapt_to_cpu(arguments)
    assert arguments.dtype == found
