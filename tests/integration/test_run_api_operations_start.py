"""Logs of a starting run-api about how Redis keeps the run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from structlog.testing import capture_logs

from grpo_api.lifetime import Lifetime
from grpo_api.persistence import report_persistence
from grpo_api.redis_link import RedisLink
from grpo_local.ports import free_port
from tests.support.wait import DEADLINE_S, wait_for_async


@pytest.fixture
def admin(redis_url: str) -> Iterator[redis.Redis]:
    """A connection to the session's Redis, whose settings are restored at the end."""
    with redis.Redis.from_url(redis_url) as connection:
        yield connection
        connection.config_set("appendonly", "yes")
        connection.config_set("appendfsync", "everysec")
        connection.acl_deluser("managed")


async def report(url: str) -> list[Any]:
    link = RedisLink(url, "start", DEADLINE_S)
    with capture_logs() as logs:
        await report_persistence(link, Lifetime())
    await link.close()
    return list(logs)


async def test_the_log_names_how_often_redis_writes_or_warns_that_it_forgets(
    redis_url: str, admin: redis.Redis
) -> None:
    for appendfsync in ("always", "everysec"):
        admin.config_set("appendfsync", appendfsync)
        (line,) = await report(redis_url)
        assert (line["log_level"], line["appendfsync"]) == ("info", appendfsync)
    admin.config_set("appendonly", "no")
    (line,) = await report(redis_url)
    assert line["log_level"] == "warning"
    assert "--appendonly yes" in line["event"]


async def test_nothing_is_logged_of_a_redis_that_keeps_its_settings_to_itself(
    redis_url: str, admin: redis.Redis
) -> None:
    admin.acl_setuser(
        "managed", enabled=True, nopass=True, keys="*", categories=["+@all"], commands=["-config"]
    )
    assert await report(redis_url.replace("//", "//managed:x@")) == []
    assert any(str(entry["object"]).startswith("config") for entry in admin.acl_log())


class CountedLifetime(Lifetime):
    """Counts the waits for the next attempt."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    async def closes_within(self, seconds: float) -> bool:
        self.waits += 1
        return await super().closes_within(seconds)


async def test_a_redis_that_is_not_there_yet_is_waited_for_until_the_server_stops() -> None:
    lifetime = CountedLifetime()
    link = RedisLink(f"redis://127.0.0.1:{free_port()}/0", "start", deadline_s=0.1)
    with capture_logs() as logs:
        reporting = asyncio.create_task(report_persistence(link, lifetime))
        await wait_for_async(lambda: lifetime.waits)
        assert not reporting.done()
        lifetime.closing.set()
        await reporting
    await link.close()
    assert logs == []
