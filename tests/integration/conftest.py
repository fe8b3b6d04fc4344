"""Fixtures of the integration tests, beyond those of the services."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.support.wait import DEADLINE_S


@pytest.fixture(scope="session")
def _client(run_api_url: str) -> Iterator[httpx.Client]:
    """One client for the session, because creating one loads certificates and is slow."""
    with httpx.Client(base_url=run_api_url, timeout=DEADLINE_S) as client:
        yield client


@pytest.fixture
def http(_client: httpx.Client) -> httpx.Client:
    """A client of a run-api without a registered trainer."""
    _client.get("/reset_data").raise_for_status()
    return _client
