"""How handlers reach what the application was built with: one record, one typed dependency.

All are coroutines: FastAPI hands a plain function to a thread, which costs more than it does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, FastAPI, Request

from grpo_api.delivery.dispatch import BatchDispatcher
from grpo_api.http.lifetime import Lifetime
from grpo_api.http.request_body import BodyReader
from grpo_api.ingest.backpressure import Limits
from grpo_api.ingest.decoder import SubmissionDecoder
from grpo_api.ingest.submit import Intake
from grpo_api.observability.metrics import Metrics
from grpo_api.store import RunStore


@dataclass(frozen=True)
class Services:
    store: RunStore
    lifetime: Lifetime
    metrics: Metrics
    dispatcher: BatchDispatcher
    bodies: BodyReader
    decoder: SubmissionDecoder
    intake: Intake
    limits: Limits


def bind_services(app: FastAPI, services: Services) -> None:
    app.state.services = services


def services_of(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


async def _services(request: Request) -> Services:
    return services_of(request)


async def _store(services: Annotated[Services, Depends(_services)]) -> RunStore:
    return services.store


async def _lifetime(services: Annotated[Services, Depends(_services)]) -> Lifetime:
    return services.lifetime


async def _metrics(services: Annotated[Services, Depends(_services)]) -> Metrics:
    return services.metrics


async def _dispatcher(services: Annotated[Services, Depends(_services)]) -> BatchDispatcher:
    return services.dispatcher


async def _limits(services: Annotated[Services, Depends(_services)]) -> Limits:
    return services.limits


async def _until_answered() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


Store = Annotated[RunStore, Depends(_store)]
ServerLifetime = Annotated[Lifetime, Depends(_lifetime)]
ServerMetrics = Annotated[Metrics, Depends(_metrics)]
Dispatcher = Annotated[BatchDispatcher, Depends(_dispatcher)]
RunLimits = Annotated[Limits, Depends(_limits)]
UntilAnswered = Annotated[AsyncExitStack, Depends(_until_answered)]
"""What is entered here ends once the answer is sent, or cut off."""
