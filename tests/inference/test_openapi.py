"""schemathesis checks over HTTP that the inference server's own routes follow its OpenAPI
document."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures.inference import InferenceServer
from tests.support.schemathesis import DEADLINE_S, ask

SETTINGS = Path(__file__).with_name("schemathesis.toml")
OWN = ("--include-path-regex", "^/(generate$|health_generate|bridge/|lora/|v1/(un)?load_lora)")
SOME = ("--phases", "fuzzing", "--max-examples", "3")
MANY = ("--max-examples", "30")


@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.parametrize(
    "options",
    [pytest.param(SOME, id="some"), pytest.param(MANY, id="many", marks=pytest.mark.full)],
)
def test_every_answer_is_one_that_is_declared(
    shared_server: InferenceServer, tmp_path: Path, options: tuple[str, ...]
) -> None:
    path = shared_server.process.log_path
    of_others = len(path.read_text())
    ask(shared_server.url, SETTINGS, tmp_path, *OWN, *options)
    log = path.read_text()[of_others:]
    assert "Traceback" not in log
    assert "500 Internal Server Error" not in log
