"""Builds the run-api application and serves it until a stop signal."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from importlib.metadata import version

import structlog
import uvloop
from fastapi import FastAPI

from grpo_api.decode import SubmissionDecoder
from grpo_api.errors import answer_errors
from grpo_api.intake import Intake
from grpo_api.metrics import Metrics
from grpo_api.middleware import CompressionMiddleware, RequestMiddleware
from grpo_api.planning.run_view import QueueLimits
from grpo_api.routes import admin, environments, scored_data, trainer
from grpo_api.routes.openapi import DESCRIPTION, OPEN_PATHS, OPENAPI_PATH, describe, refusals
from grpo_api.routes.requests import MAX_RECORD_BYTES, AppServices, BodyLimits
from grpo_api.server import HttpServer, forward_library_logs, keep_freed_memory
from grpo_api.store.checks import check_redis, watch_disk
from grpo_api.store.redis import RedisLink
from grpo_api.store.run import RunStore
from grpo_core.http_connections import raise_open_files
from grpo_core.logs import configure_logging
from grpo_core.redis.server import LocalRedis, disk_bytes
from grpo_core.redis.url import local_redis_directory
from grpo_core.security import BearerTokenGuard, SameSiteOnly, listed
from grpo_core.tree.run_api import RunApiSettings

_HELD_BODIES = 4
"""Waiting submissions may hold this many bodies of the largest size in memory."""
_BODIES_AT_ONCE = 8
"""All requests together, waiting or not, may hold this many bodies of the largest size."""


def create_app(store: RunStore, settings: RunApiSettings, closing: asyncio.Event) -> FastAPI:
    """Build the application on `store`, which it closes when it shuts down.

    The caller sets `closing` when the process receives a stop signal.
    """

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        services.decoder.close()
        await store.link.close()

    app = FastAPI(
        title="run-api",
        version=version("grpo-run-api"),
        description=DESCRIPTION,
        lifespan=lifespan,
        responses=refusals(403) if settings.token is None else refusals(401, 403),
        # FastAPI's documentation pages load scripts from the internet
        docs_url=None,
        redoc_url=None,
        openapi_url=OPENAPI_PATH,
        # An operation id is the name of its handler.
        generate_unique_id_function=lambda route: route.name,
    )
    limits = QueueLimits(settings.max_queued_groups, settings.queued_bytes_limit)
    largest_body = max(settings.max_body_bytes, MAX_RECORD_BYTES)
    services = AppServices(
        store=store,
        closing=closing,
        metrics=Metrics(settings.redis_disk_bytes),
        bodies=BodyLimits(settings.body_deadline_s, _BODIES_AT_ONCE * largest_body),
        decoder=SubmissionDecoder(settings.max_body_bytes),
        intake=Intake(
            store,
            limits,
            closing,
            full_s=settings.full_queue_wait_s,
            held_bytes=_HELD_BODIES * settings.max_body_bytes,
        ),
        limits=limits,
    )
    app.state.services = services
    for routes in (admin, trainer, environments, scored_data):
        app.include_router(routes.router)
    # The middleware added last is the outermost.
    app.add_middleware(CompressionMiddleware)
    app.add_middleware(BearerTokenGuard, token=settings.token, open_paths=OPEN_PATHS)
    app.add_middleware(SameSiteOnly, hosts=listed(settings.allowed_hosts))
    app.add_middleware(
        RequestMiddleware,
        closing=closing,
        metrics=services.metrics,
        routes=app.routes,
    )
    answer_errors(app)
    describe(app, token_needed=settings.token is not None)
    return app


def serve(settings: RunApiSettings) -> None:
    """Serve until SIGTERM or SIGINT. Redis may start later; `/readyz` shows if it is up.

    Raises:
        NoRedisServer, RedisNotStarted, OSError: no --redis-url was given, and no local Redis could
            be started.
    """
    configure_logging("run-api", settings.log_level)
    forward_library_logs()
    structlog.get_logger().info(
        "run_api.starting",
        run_id=settings.run_id,
        access_token_required=settings.token is not None,
    )
    keep_freed_memory()
    raise_open_files()
    # Objects made so far live as long as the process, so the garbage collector can skip them.
    gc.freeze()
    directory = local_redis_directory()
    with (
        LocalRedis(directory) if settings.may_start_redis else nullcontext() as local,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        if local is not None and local.is_ours and settings.redis_disk_bytes is None:
            settings = settings.model_copy(update={"redis_disk_bytes": disk_bytes(directory)})
        runner.run(_serve(settings))


async def _serve(settings: RunApiSettings) -> None:
    closing = asyncio.Event()
    link = RedisLink(
        settings.redis_url.get_secret_value(), settings.run_id, settings.redis_deadline_s
    )
    store = RunStore(link, settings.environment_timeout_s, settings.leased_bytes_limit)
    server = HttpServer(
        create_app(store, settings, closing),
        closing,
        settings.host,
        settings.port,
        settings.stop_grace_s,
    )
    checking = asyncio.create_task(_check_redis(link, server))
    watching = asyncio.create_task(watch_disk(link, settings.redis_disk_bytes))
    await server.serve()
    watching.cancel()
    if checking.done():
        checking.result()
    checking.cancel()


async def _check_redis(link: RedisLink, server: HttpServer) -> None:
    try:
        await check_redis(link)
    except Exception:
        server.stop()
        raise
