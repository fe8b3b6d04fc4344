"""run-api does what its OpenAPI document says, and only that: asked by schemathesis over HTTP."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from tests.fixtures.run_api import RunningApi, start_run_api
from tests.integration.run_api_calls import (
    ENVIRONMENT,
    acknowledge,
    disconnect,
    group,
    lease,
    next_batch,
    register,
    register_environment,
    send,
    start,
    status_env,
    submit,
)

SETTINGS = Path(__file__).with_name("schemathesis.toml")
FULL_EXAMPLES = 20
"""Of each operation in each phase, beside those that cover its schema."""
DEADLINE_S = 3600.0
RUN_ID = "openapi"


@pytest.fixture(scope="module")
def api(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApi]:
    running = start_run_api(
        redis_url,
        tmp_path_factory.mktemp("openapi"),
        run_id=RUN_ID,
        further={"--full-queue-wait-s": 0.1},
    )
    yield running
    running.process.stop()


@pytest.fixture
def client(api: RunningApi) -> Iterator[httpx.Client]:
    """Of a run with a trainer, an environment, one group in the queue and one in a buffer."""
    with httpx.Client(base_url=api.url, timeout=120.0) as client:
        client.get("/reset_data").raise_for_status()
        start(client)
        env_id = register_environment(client)["env_id"]
        submit(client, 1)
        send(client, 2, size=1, env_id=env_id)
        yield client


def ask(url: str, directory: Path, *options: str) -> str:
    """The report of schemathesis, which found nothing wrong. The same requests each time."""
    command = [str(Path(sys.executable).with_name("schemathesis"))]
    command += ["--config-file", str(SETTINGS), "run", f"{url}/openapi.json", "--no-color"]
    command += ["--generation-deterministic", "--exclude-path", "/reset_data", *options]
    done = subprocess.run(  # in a directory of its own, where it may leave what it likes
        command, cwd=directory, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def document(url: str) -> dict[str, Any]:
    answer = httpx.get(f"{url}/openapi.json").raise_for_status()
    read: dict[str, Any] = answer.json()
    return read


def operations(read: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        f"{method.upper()} {path}": operation
        for path, methods in read["paths"].items()
        for method, operation in methods.items()
    }


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
    assert "18 selected / 19 total" in report
    log = api.process.log_path.read_text()
    assert "Traceback" not in log
    assert "request failed" not in log


class DeclaredAnswers:
    """A hook of a client: every answer is one that the document declares."""

    def __init__(self, url: str) -> None:
        self._read = document(url)
        self.statuses: set[int] = set()

    def __call__(self, answer: httpx.Response) -> None:
        answer.read()
        self.statuses.add(answer.status_code)
        path = re.sub(r"/\d+/", "/{batch_id}/", answer.request.url.path)
        declared = operations(self._read)[f"{answer.request.method} {path}"]["responses"]
        schema = declared[str(answer.status_code)]["content"]["application/json"]["schema"]
        Draft202012Validator(schema | {"components": self._read["components"]}).validate(
            answer.json()
        )


def test_a_run_from_end_to_end_is_as_declared(client: httpx.Client, api: RunningApi) -> None:
    """Answers that take some calls to come to, and those that are streamed."""
    client.get("/reset_data").raise_for_status()
    declared = DeclaredAnswers(api.url)
    client.event_hooks["response"] = [declared]
    for path in ("/batch", "/latest_example"):
        client.get(path)
    client.post("/register-env", json=ENVIRONMENT)
    trainer = register(client).json()["uuid"]
    client.get("/batch")
    env_id = register_environment(client)["env_id"]
    part = group(3, size=1, env_id=env_id)
    send(client, 1)
    client.post("/scored_data", json=part)
    client.post("/scored_data_list", json=[group(2), part])
    for asked in (env_id, 77):
        status_env(client, asked)
    assert next_batch(client) == [1, 2]
    for path in ("/environments", "/latest_example", "/info", "/wandb_info", "/status"):
        client.get(path)
    send(client, 4)
    assert lease(client, trainer, after=1).json()["batch_id"] == 2
    client.get("/batch")
    for batch_id in (2, 9):
        acknowledge(client, trainer, batch_id)
    disconnect(client, env_id)
    assert declared.statuses == {200, 404, 409}
