"""What child processes get of this one's environment."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from grpo_core import cpu
from grpo_core.cpu import SPIN_COUNT, WAIT_POLICY, Cpu, prepare_cpu
from grpo_core.process import ManagedProcess, children

DEADLINE_S = 60.0
NAME, OURS = SPIN_COUNT
CACHE = "LRU_CACHE_CAPACITY"


def test_a_child_is_no_rank_of_torchrun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A server with these variables waits for torchrun's store, and ends."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KEPT", "1")
    names = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE", "KEPT", "ADDED"]
    code = f"import os; print([name for name in {names} if name in os.environ])"
    log = tmp_path / "log"
    child = ManagedProcess("child", [sys.executable, "-c", code], log, {"ADDED": "1"})
    assert child.wait(DEADLINE_S) == 0
    child.stop(DEADLINE_S)  # collects its status
    assert log.read_text().strip() == "['KEPT', 'ADDED']"


@pytest.mark.parametrize(
    ("given", "name", "expected"),
    [
        ({}, NAME, OURS),
        ({NAME: "infinity"}, NAME, "infinity"),
        ({WAIT_POLICY: "PASSIVE"}, NAME, None),
        ({}, CACHE, "64"),
        ({CACHE: "1024"}, CACHE, "1024"),
    ],
)
def test_what_the_user_has_set_wins(
    given: dict[str, str], name: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    prepare_cpu()
    assert os.environ.get(name) == expected


@pytest.mark.parametrize(
    ("largest", "variables", "keeps"),
    [
        (2**27, {}, True),
        (2**27 + 1, {}, False),
        (2**27, {"MALLOC_MMAP_THRESHOLD_": "262144"}, False),
    ],
)
def test_memory_that_a_process_frees_serves_its_next_allocations(
    largest: int, variables: dict[str, str], keeps: bool
) -> None:
    """Counted in pages that the kernel must fill."""
    code = (
        "import resource\n"
        "from grpo_core.cpu import keep_freed_memory\n"
        f"keep_freed_memory({largest})\n"
        "for turn in range(2):\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    block = b'1' * 2**26\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
        "    del block\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | variables,
        check=True,
        capture_output=True,
        text=True,
    )
    first, second = map(int, found.stdout.split())
    assert (second < first / 10) == keeps


AMD, INTEL = "AuthenticAMD", "GenuineIntel"


@pytest.mark.parametrize(
    ("vendor", "flags", "variables", "is_slow", "by_onednn"),
    [
        (AMD, "avx2 avx512f avx512_bf16", {}, False, True),
        (AMD, "avx2", {}, True, False),
        (INTEL, "avx2 avx512f", {}, True, False),
        (INTEL, "avx2 avx512f amx_bf16", {}, False, False),
        # what a user, or `make test-cpus`, takes away
        (AMD, "avx2 avx512f avx512_bf16", {cpu.ISA_LIMIT: "AVX512_CORE"}, True, True),
        (AMD, "avx2 avx512f avx512_bf16", {cpu.ISA_LIMIT: "AVX512_CORE_BF16"}, False, True),
        (AMD, "avx2 avx512f avx512_bf16", {cpu.ISA_LIMIT: "AVX2"}, True, False),
        (AMD, "avx2 avx512f avx512_bf16", {cpu.PRODUCTS: "mkl"}, False, False),
        (INTEL, "avx2", {cpu.PRODUCTS: "onednn"}, True, True),
    ],
)
def test_what_a_cpu_computes_slowly(
    vendor: str,
    flags: str,
    variables: dict[str, str],
    is_slow: bool,
    by_onednn: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    core = f"vendor_id\t: {vendor}\nflags\t\t: fpu {flags}\n\n"
    cpuinfo.write_text(2 * core)
    monkeypatch.setattr(cpu, "CPUINFO", cpuinfo)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for name in (cpu.ISA_LIMIT, cpu.PRODUCTS):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = Cpu.find()
    assert (found.is_slow_in_bfloat16, found.is_faster_with_onednn) == (is_slow, by_onednn)


def test_a_cpu_that_nobody_describes_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "CPUINFO", tmp_path / "nothing")
    found = Cpu.find()
    assert not found.is_slow_in_bfloat16
    assert found.is_faster_with_onednn == (os.environ.get(cpu.PRODUCTS) == "onednn")


@pytest.mark.parametrize(
    ("quota", "expected"), [("max 100000", 6), ("150000 100000", 2), ("900000 100000", 6)]
)
def test_cores_are_those_that_this_process_may_use(
    quota: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(f"{quota}\n")
    monkeypatch.setattr(cpu, "QUOTA", file)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    assert Cpu.find().cores == expected


def test_a_process_that_ends_meanwhile_has_no_children() -> None:
    for _ in range(200):
        with subprocess.Popen(["true"]) as process:
            reaped = threading.Thread(target=process.wait)
            reaped.start()
            while reaped.is_alive():
                assert not children(process.pid)
            reaped.join()
