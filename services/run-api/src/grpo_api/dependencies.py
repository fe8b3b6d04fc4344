"""How handlers reach what the application was built with: one record, one typed dependency."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, FastAPI, Request

from grpo_api.dispatch import BatchDispatcher
from grpo_api.intake import Intake
from grpo_api.store import RunStore


@dataclass(frozen=True)
class Services:
    store: RunStore
    dispatcher: BatchDispatcher
    intake: Intake


def bind_services(app: FastAPI, services: Services) -> None:
    app.state.services = services


def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


def _store(services: Annotated[Services, Depends(_services)]) -> RunStore:
    return services.store


def _dispatcher(services: Annotated[Services, Depends(_services)]) -> BatchDispatcher:
    return services.dispatcher


def _intake(services: Annotated[Services, Depends(_services)]) -> Intake:
    return services.intake


Store = Annotated[RunStore, Depends(_store)]
Dispatcher = Annotated[BatchDispatcher, Depends(_dispatcher)]
GroupIntake = Annotated[Intake, Depends(_intake)]
