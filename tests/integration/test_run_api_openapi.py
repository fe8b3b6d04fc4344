"""schemathesis checks over HTTP that run-api follows its OpenAPI document."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.run_api import RunningApi
from tests.integration.conftest import StartApi
from tests.integration.run_api_calls import ApiClient

SETTINGS = Path(__file__).with_name("schemathesis.toml")
FULL_EXAMPLES = 20
"""Random requests per operation and phase, in addition to those that cover the schema."""
DEADLINE_S = 3600.0


@pytest.fixture(scope="module")
def api(own_api: StartApi) -> RunningApi:
    return own_api("openapi", further={"--full-queue-wait-s": 0.1})


@pytest.fixture
def client(api: RunningApi) -> Iterator[ApiClient]:
    """A run with a trainer, an environment, one queued group and one buffered part."""
    with ApiClient(base_url=api.url, timeout=120.0) as client:
        client.get("/reset_data").raise_for_status()
        client.start()
        env_id = client.register_environment()["env_id"]
        client.submit(1)
        client.send_group(2, size=1, env_id=env_id)
        yield client


def ask(url: str, directory: Path, *options: str) -> str:
    """Run schemathesis with the same requests each time. Returns its report without failures."""
    command = [str(Path(sys.executable).with_name("schemathesis"))]
    command += ["--config-file", str(SETTINGS), "run", f"{url}/openapi.json", "--no-color"]
    command += ["--generation-deterministic", "--exclude-path", "/reset_data", *options]
    done = subprocess.run(  # in a temporary directory, because schemathesis writes files
        command, cwd=directory, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.usefixtures("client")
@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--phases", "fuzzing", "--max-examples", "3"), id="some"),
        pytest.param(("--max-examples", str(FULL_EXAMPLES)), id="many", marks=pytest.mark.full),
    ],
)
def test_every_answer_is_one_that_is_declared(
    api: RunningApi, tmp_path: Path, options: tuple[str, ...]
) -> None:
    report = ask(api.url, tmp_path, *options)
    assert "19 selected / 20 total" in report
    log = api.process.log_path.read_text()
    assert "Traceback" not in log
    assert "request.failed" not in log
