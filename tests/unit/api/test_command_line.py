"""`--help` and mistakes answer without importing the web framework or the Redis client."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("fastapi", "starlette", "uvicorn", "redis")
REPORT_HEAVY_MODULES = f"""
import sys
sys.argv[0] = "run-api"
from grpo_api.__main__ import main
try:
    main()
finally:
    sys.stderr.write("heavy=" + ",".join(sorted({{*sys.modules}} & {{*{HEAVY!r}}})) + ";")
"""


@pytest.mark.parametrize(
    ("option", "value", "status", "says"),
    [
        ("--help", None, 0, "--max-body-bytes"),
        ("--port", "0", 2, "--port"),
        ("--redis-url", "http://x", 2, "--redis-url"),
        ("--redis-url", "redis://x:port", 2, "--redis-url"),
        ("--run-id", "a{b}", 2, "--run-id"),
    ],
)
def test_answers_before_anything_heavy(
    option: str, value: str | None, status: int, says: str
) -> None:
    words = [option] if value is None else [option, value]
    ended = subprocess.run(
        [sys.executable, "-c", REPORT_HEAVY_MODULES, *words],
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    assert ended.returncode == status
    assert says in ended.stdout + ended.stderr
    assert "heavy=;" in ended.stderr


def test_module_is_the_command() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "grpo_api", "--help"],
        capture_output=True,
        text=True,
        timeout=10,
        check=True,
    )
    assert ended.stdout.startswith("usage: run-api")
