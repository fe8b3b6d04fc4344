"""What integration tests share beyond the services' own fixtures."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.support.wait import DEADLINE_S


@pytest.fixture(scope="session")
def _client(run_api_url: str) -> Iterator[httpx.Client]:
    """One for the session: making a client, which loads certificates, outlasts most tests."""
    with httpx.Client(base_url=run_api_url, timeout=DEADLINE_S) as client:
        yield client


@pytest.fixture
def http(_client: httpx.Client) -> httpx.Client:
    """A client of a run-api that knows of no trainer yet."""
    _client.get("/reset_data").raise_for_status()
    return _client
