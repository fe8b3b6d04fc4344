"""`--help` and mistakes answer without importing the web framework or the Redis client."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

HEAVY = ("fastapi", "starlette", "uvicorn", "uvloop", "redis", "prometheus_client")
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
        ("--token", "", 2, "--token"),
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
        timeout=60,
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
        timeout=60,
        check=True,
    )
    assert ended.stdout.startswith("usage: run-api")


@pytest.mark.parametrize(
    ("words", "token", "status"),
    [(["--help"], "hunter2", 0), ([], "hunter 2", 2), ([], "hunter2\n", 2)],
)
def test_a_token_is_never_shown(words: list[str], token: str, status: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "grpo_api", *words],
        env={**os.environ, "RUN_API_TOKEN": token},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == status
    assert "--token" in ended.stdout + ended.stderr
    assert "hunter" not in ended.stdout + ended.stderr
