"""Runs the application in this process until it is told to stop."""

from __future__ import annotations

import asyncio
import gc

import structlog
import uvloop

from grpo_api.app import create_app
from grpo_api.http.lifetime import Lifetime
from grpo_api.http.server import HttpServer
from grpo_api.ingest.allocator import keep_freed_memory
from grpo_api.observability.logging import forward_library_logs
from grpo_api.settings import RunApiSettings
from grpo_api.store import RunStore
from grpo_api.store.redis import RedisLink, report_persistence
from grpo_core.logs import configure_logging


def serve(settings: RunApiSettings) -> None:
    """Serve until SIGTERM or SIGINT. Redis need not be up yet: `/readyz` says whether it is."""
    configure_logging("run-api", settings.log_level)
    forward_library_logs()
    keep_freed_memory()
    structlog.get_logger().info(
        "starting", run_id=settings.run_id, token_needed=settings.token is not None
    )
    # What was made until here stays: the collector need not go through it again and again.
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings))


async def _serve(settings: RunApiSettings) -> None:
    lifetime = Lifetime()
    link = RedisLink(
        settings.redis_url.get_secret_value(), settings.run_id, settings.redis_deadline_s
    )
    store = RunStore(link, settings.environment_timeout_s, settings.max_leased_bytes)
    server = HttpServer(
        create_app(store, settings, lifetime),
        lifetime,
        settings.host,
        settings.port,
        settings.stop_grace_s,
    )
    reporting = asyncio.create_task(report_persistence(link, lifetime))
    await server.serve()
    reporting.cancel()
