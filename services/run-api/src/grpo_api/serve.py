"""Runs the application in this process until it is told to stop."""

from __future__ import annotations

import structlog
import uvicorn

from grpo_api.app import create_app
from grpo_api.redis_link import RedisLink
from grpo_api.settings import RunApiSettings
from grpo_api.store import RunStore
from grpo_core.logs import configure_logging

_SHUTDOWN_GRACE_S = 10


def serve(settings: RunApiSettings) -> None:
    """Serve until SIGTERM or SIGINT. Redis need not be up yet: `/health` says whether it is."""
    configure_logging("run-api", settings.log_level)
    link = RedisLink(settings.redis_url, settings.run_id, settings.redis_deadline_s)
    store = RunStore(link, settings.environment_timeout_s)
    structlog.get_logger().info(
        "listening", host=settings.host, port=settings.port, run_id=settings.run_id
    )
    uvicorn.run(
        create_app(store, settings),
        host=settings.host,
        port=settings.port,
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=_SHUTDOWN_GRACE_S,
    )
