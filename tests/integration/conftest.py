"""Fixtures of the integration tests, beyond those of the services."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis

from tests.fixtures.run_api import RunningApi, start_run_api
from tests.integration.run_api_calls import ApiClient
from tests.integration.run_store_rig import Run, open_run
from tests.support.wait import DEADLINE_S


@pytest.fixture(scope="session")
def _client(run_api_url: str) -> Iterator[ApiClient]:
    """One client for the session, because creating one loads certificates and is slow."""
    with ApiClient(base_url=run_api_url, timeout=DEADLINE_S) as client:
        yield client


@pytest.fixture
def http(_client: ApiClient, redis_url: str) -> ApiClient:
    """A client of a run-api without a registered trainer. The first environment gets the id 0."""
    _client.get("/reset_data").raise_for_status()
    with redis.Redis.from_url(redis_url) as connection:
        forget_env_ids(connection)
    return _client


def forget_env_ids(connection: redis.Redis) -> None:
    """run-api never uses an id again, also not after a reset."""
    for key in connection.scan_iter("*:last_env_id"):
        connection.delete(key)


@pytest.fixture
async def run(redis_url: str) -> AsyncIterator[Run]:
    """A run without HTTP."""
    async with open_run(redis_url, "store-tests") as run:
        yield run


StartApi = Callable[..., RunningApi]


@pytest.fixture(scope="module")
def own_api(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartApi]:
    """Starts a run-api for this module alone: of a run, with options of `start_run_api`."""
    with ExitStack() as stack:

        def start(run_id: str, **options: Any) -> RunningApi:
            api = start_run_api(
                redis_url, tmp_path_factory.mktemp(run_id), run_id=run_id, **options
            )
            stack.callback(api.process.stop)
            return api

        yield start
