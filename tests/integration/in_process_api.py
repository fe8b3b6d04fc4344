"""run-api in the test's own process, for settings that are not worth a process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from grpo_api.app import create_app
from grpo_api.lifetime import Lifetime
from grpo_api.redis_link import RedisLink
from grpo_api.settings import RunApiSettings
from grpo_api.store import RunStore


@asynccontextmanager
async def in_process_api(
    lifetime: Lifetime | None = None, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of it. `options`: those of `RunApiSettings`."""
    settings = RunApiSettings(**options)
    link = RedisLink(settings.redis_url, settings.run_id, settings.redis_deadline_s)
    store = RunStore(link, settings.environment_timeout_s, settings.max_leased_bytes)
    transport = httpx.ASGITransport(create_app(store, settings, lifetime or Lifetime()))
    async with httpx.AsyncClient(transport=transport, base_url="http://run-api") as client:
        yield client
    await store.close()
