"""The health check of a container, run as the container runs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.unit.env.http_stub import stub_server


def probe(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "grpo_core.health_probe", *arguments],
        capture_output=True,
        text=True,
        env={"http_proxy": "http://127.0.0.1:9", "PATH": ""},
        timeout=60,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(("answer", "verdict"), [(200, 0), (204, 0), (503, 1), (404, 1), (302, 1)])
def test_only_success_is_healthy(answer: int, verdict: int) -> None:
    with stub_server({"GET /readyz": lambda _body: (answer, {})}) as server:
        status, said = probe(f"{server.url}/readyz")
    assert status == verdict
    assert said == ("" if verdict == 0 else f"{server.url}/readyz answered {answer}\n")


def test_nobody_there_is_unhealthy_and_says_why() -> None:
    status, said = probe("http://127.0.0.1:9/readyz")
    assert status == 1
    assert "http://127.0.0.1:9/readyz: ConnectionRefusedError" in said


@pytest.mark.parametrize("arguments", [(), ("ftp://h/",), ("http://h/", "more")])
def test_anything_else_is_told_how_it_is_used(arguments: tuple[str, ...]) -> None:
    status, said = probe(*arguments)
    assert status == 2
    assert said.startswith("usage: python -m grpo_core.health_probe http://")
