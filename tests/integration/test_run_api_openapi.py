"""run-api does what its OpenAPI document says, and only that: asked by schemathesis over HTTP."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from jsonschema import Draft202012Validator

from grpo_api.app import create_app
from grpo_api.lifetime import Lifetime
from grpo_api.redis_link import RedisLink
from grpo_api.settings import RunApiSettings
from grpo_api.store import RunStore
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
from tests.integration.stored_keys import stored_keys

SETTINGS = Path(__file__).with_name("schemathesis.toml")
FULL_EXAMPLES = 20
"""Of each operation in each phase, beside those that cover its schema."""
DEADLINE_S = 3600.0
SETTLE_S = 60.0
RUN_ID = "openapi"
SHORT_LIVED = ("receipt:", "last_group_id", "seen")
"""Answers kept for repeats; ids that were reserved and not used; the time of the last poll."""
WRONG = (
    *("--mode", "negative", "--phases", "fuzzing"),
    *("--include-path-regex", "^/(register|scored_data|disconnect-env|status-env|batch/)"),
)
"""What each route that takes something refuses."""
GROWTH_BYTES = 64 * 1024 * 1024
"""A leak in every request adds up to more."""


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


def clients_of(server: psutil.Process, port: int) -> int:
    return sum(
        connection.laddr.port == port and connection.status == psutil.CONN_ESTABLISHED
        for connection in server.net_connections("tcp")
    )


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


@pytest.mark.full
@pytest.mark.timeout(2 * DEADLINE_S)
def test_refused_requests_leave_nothing_behind(
    api: RunningApi, client: httpx.Client, redis_url: str, tmp_path: Path
) -> None:
    """Of what they store: `test_run_api_bad_input`."""
    server, port = psutil.Process(api.process.pid), int(api.url.rpartition(":")[2])
    ask(api.url, tmp_path, *WRONG, "--max-examples", str(FULL_EXAMPLES))
    before = stored_keys(redis_url, RUN_ID, SHORT_LIVED)
    used, files = server.memory_info().rss, server.num_fds()
    report = ask(api.url, tmp_path, *WRONG, "--max-examples", str(4 * FULL_EXAMPLES))
    assert "7 selected" in report
    assert stored_keys(redis_url, RUN_ID, SHORT_LIVED) == before
    client.close()
    api.process.wait_until(lambda: clients_of(server, port) == 0, SETTLE_S)
    # a connection is closed a moment after it has left that state
    api.process.wait_until(lambda: server.num_fds() <= files, SETTLE_S)
    assert server.memory_info().rss - used < GROWTH_BYTES


def test_a_token_is_declared_for_every_route_but_probes_if_there_is_one() -> None:
    """That it is asked for: `test_run_api_operations`."""
    store = RunStore(RedisLink("redis://127.0.0.1:1/0", RUN_ID, 1.0), 60.0, 1024)
    for token, is_open in (("x", {"GET /health", "GET /healthz", "GET /readyz"}), (None, None)):
        settings = RunApiSettings(token=token)  # type: ignore[arg-type]
        declared = operations(create_app(store, settings, Lifetime()).openapi())
        open_ones = {name for name, found in declared.items() if "security" not in found}
        assert open_ones == (is_open or {*declared})
        for name, found in declared.items():
            assert ("401" in found["responses"]) == (name not in open_ones), name


def test_headers_and_keys_are_declared(api: RunningApi) -> None:
    for name, operation in operations(document(api.url)).items():
        for status, answer in operation["responses"].items():
            assert "X-Request-Id" in answer["headers"], (name, status)
            assert ("Retry-After" in answer["headers"]) == (status == "503"), (name, status)
        takes_keys = name.startswith(("POST /scored_data", "POST /register-env"))
        parameters = {parameter["name"] for parameter in operation.get("parameters", ())}
        assert ("idempotency-key" in parameters) == takes_keys


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
