"""What the numbers were measured on and with, without naming the machine."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil

from benchmarks.run_api_bench.systems import ATROPOSLIB_PINS
from grpo_core.redis.server import redis_binary

_BYTES_PER_GIB = 1 << 30
_VERSION_DEADLINE_S = 10.0
_SERVING = ("starlette", "pydantic-core", "uvloop", "httptools")
"""What run-api uses where it is installed, beside its declared requirements."""
_PACKAGE_NAME = re.compile(r"[A-Za-z0-9._-]+")


def host() -> list[str]:
    """One line per fact about the machine."""
    memory_gib = psutil.virtual_memory().total / _BYTES_PER_GIB
    load = os.getloadavg()[0]
    return [
        f"CPU: {_cpu_model()}, {len(os.sched_getaffinity(0))} cores; memory: {memory_gib:.0f} GiB",
        f"Linux {platform.release()}, Python {platform.python_version()}; load average {load:.1f}",
    ]


def description() -> list[str]:
    """The same, and what was compared."""
    return [
        *host(),
        f"Redis {_redis_version()} (appendonly yes, appendfsync always)",
        f"atroposlib: {', '.join(_atroposlib_packages())}",
        f"run-api: {', '.join(_run_api_packages())}",
    ]


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _redis_version() -> str:
    command = [redis_binary(), "--version"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=_VERSION_DEADLINE_S
    )
    found = re.search(r"\bv=(\S+)", done.stdout)
    return found.group(1) if found else done.stdout.strip()


def _atroposlib_packages() -> list[str]:
    shown = ("atroposlib", "fastapi", "uvicorn", "pydantic", *_SERVING)
    pins = dict(
        line.split("==") for line in ATROPOSLIB_PINS.read_text().splitlines() if "==" in line
    )
    return [f"{name} {pins[name]}" for name in shown]


def _run_api_packages() -> list[str]:
    required = [_PACKAGE_NAME.match(line) for line in requires("grpo-run-api") or []]
    names = [match.group() for match in required if match and not _is_ours(match.group())]
    return list(_installed([*names, "pydantic", *_SERVING]))


def _is_ours(package: str) -> bool:
    return package.startswith("grpo-")


def _installed(packages: Iterable[str]) -> Iterable[str]:
    for package in dict.fromkeys(packages):
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
