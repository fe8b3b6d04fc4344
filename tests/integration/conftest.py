"""What integration tests share beyond the services' own fixtures."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest


@pytest.fixture
def http(clean_run_api: str) -> Iterator[httpx.Client]:
    """A client of a run-api that knows of no trainer yet."""
    with httpx.Client(base_url=clean_run_api, timeout=30.0) as client:
        yield client
