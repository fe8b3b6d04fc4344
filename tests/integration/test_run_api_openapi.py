"""schemathesis checks over HTTP that run-api follows its OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_core.security import authorization
from tests.fixtures.run_api import RunningApi
from tests.integration.conftest import StartApi
from tests.integration.run_api_calls import ApiClient
from tests.support.schemathesis import DEADLINE_S, ask

SETTINGS = Path(__file__).with_name("schemathesis.toml")
SOME = ("--phases", "fuzzing", "--max-examples", "3")
MANY = ("--max-examples", "20")
"""Random requests per operation and phase, in addition to those that cover the schema."""


TOKEN = "one-token"


@pytest.fixture(scope="module")
def token(request: pytest.FixtureRequest) -> str | None:
    found: str | None = request.param
    return found


@pytest.fixture(scope="module")
def api(own_api: StartApi, token: str | None) -> RunningApi:
    secret = {} if token is None else {"RUN_API_TOKEN": token}
    further = {"--full-queue-wait-s": 0.1}
    return own_api(f"openapi-{token}", environment=secret, further=further)


@pytest.fixture
def client(api: RunningApi, token: str | None) -> Iterator[ApiClient]:
    """A run with a trainer, an environment, one queued group and one buffered part."""
    with ApiClient(base_url=api.url, timeout=120.0, headers=authorization(token)) as client:
        client.get("/reset_data").raise_for_status()
        client.start()
        env_id = client.register_environment()["env_id"]
        client.submit(1)
        client.send_group(2, size=1, env_id=env_id)
        yield client


@pytest.mark.usefixtures("client")
@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.parametrize(
    ("token", "options"),
    [
        pytest.param(TOKEN, SOME, id="some"),
        pytest.param(TOKEN, MANY, id="many", marks=pytest.mark.full),
        pytest.param(None, MANY, id="many-without-token", marks=pytest.mark.full),
    ],
    indirect=["token"],
)
def test_every_answer_is_one_that_is_declared(
    api: RunningApi, token: str | None, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """With a token, also that no request without it, or with another one, is answered."""
    report = ask(
        api.url, SETTINGS, tmp_path, *options, "--exclude-path", "/reset_data", token=token
    )
    assert "19 selected / 20 total" in report
    log = api.process.log_path.read_text()
    assert "Traceback" not in log
    assert "request.failed" not in log
