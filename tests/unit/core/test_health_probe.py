"""The health check of a container."""

from __future__ import annotations

import pytest

from grpo_core.health_probe import main
from tests.unit.env.http_stub import stub_server


@pytest.mark.parametrize(("answer", "verdict"), [(204, 0), (503, 1)])
def test_only_success_is_healthy(
    answer: int, verdict: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with stub_server({"GET /readyz": lambda _body: (answer, {})}) as server:
        assert main([f"{server.url}/readyz"]) == verdict
    said = capsys.readouterr().err
    assert said == ("" if verdict == 0 else f"{server.url}/readyz answered {answer}\n")
