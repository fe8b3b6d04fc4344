from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.support.virtual_time import VirtualTimeLoop


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Leases, holds and deadlines of realistic length expire at once."""
    return {"virtual": VirtualTimeLoop}
