"""Clients of run-api: one for trainers (blocking), one for environments (async)."""

from __future__ import annotations

import gzip
import time
from typing import Any, TypeVar

import httpx
from pydantic import ValidationError

from grpo_core.errors import ProtocolViolation, ServiceUnavailable
from grpo_core.service_client import AsyncServiceClient, ServiceClient
from grpo_core.wire import (
    EnvironmentRegistration,
    EnvironmentStatus,
    Registration,
    ScoredGroup,
    TrainerInfo,
    WireModel,
)

SERVICE = "Atropos API"
"""Name in messages: users search for "Atropos API not reachable"."""

GZIP_FROM_BYTES = 1024
_REQUEST_TIMEOUT_S = 60.0
_POLL_S = 0.05

M = TypeVar("M", bound=WireModel)


class TrainerClient(ServiceClient):
    """What a trainer asks of run-api.

    Args:
        base_url: for example http://127.0.0.1:8000
        deadline_s: how long one call may keep trying before `ServiceUnavailable`.
    """

    def __init__(self, base_url: str, deadline_s: float = 60.0) -> None:
        super().__init__(SERVICE, base_url, deadline_s, _REQUEST_TIMEOUT_S)

    def register(self, registration: Registration) -> int:
        """Announce the run; returns the trainer's id.

        Raises:
            ServiceUnavailable: run-api did not answer in time.
            RequestRefused: the registration conflicts with the run in progress.
        """
        answer = self._request("POST", "/register", json=registration.model_dump())
        return int(answer["uuid"])

    def next_batch(self, deadline_s: float) -> list[ScoredGroup]:
        """Wait for the next batch.

        Raises:
            ServiceUnavailable: no batch was complete within `deadline_s` seconds.
            ProtocolViolation: run-api answered that no trainer is registered, or a broken group.
        """
        give_up_at = time.monotonic() + deadline_s
        while True:
            groups = self._try_batch()
            if groups is not None:
                return groups
            if time.monotonic() >= give_up_at:
                raise ServiceUnavailable(
                    f"{SERVICE}: no batch within {deadline_s:g} s; are environments running and "
                    f"sending groups? Look at {self.base_url}/status and at their logs"
                )
            time.sleep(_POLL_S)

    def _try_batch(self) -> list[ScoredGroup] | None:
        # A lost answer to GET /batch is not asked for again blindly: the next call would
        # acknowledge it. Registering again gets it back.
        answer = self._request("GET", "/batch", repeat_lost_answers=False)
        if answer.get("status") == "error":
            raise ProtocolViolation(f"{SERVICE}: {answer.get('message')}")
        if answer["batch"] is None:
            return None
        try:
            return [ScoredGroup.model_validate(group) for group in answer["batch"]]
        except ValidationError as error:
            raise ProtocolViolation(f"{SERVICE}: broken group in a batch: {error}") from error

    def _request(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        return _json_object(self._send(method, path, **request))


class EnvironmentClient(AsyncServiceClient):
    """What an environment asks of run-api."""

    def __init__(self, base_url: str, deadline_s: float = 60.0) -> None:
        super().__init__(SERVICE, base_url, deadline_s, _REQUEST_TIMEOUT_S)

    async def info(self) -> TrainerInfo:
        return _parse(TrainerInfo, await self._request("GET", "/info"))

    async def register(self, registration: EnvironmentRegistration) -> dict[str, Any] | None:
        """Announce the environment; None while run-api waits for a trainer to start."""
        answer = await self._request("POST", "/register-env", json=registration.model_dump())
        return answer if answer["status"] == "success" else None

    async def status(self, env_id: int) -> EnvironmentStatus:
        answer = await self._request("GET", "/status-env", json={"env_id": env_id})
        return _parse(EnvironmentStatus, answer)

    async def submit(self, group: ScoredGroup) -> dict[str, Any]:
        """Send one scored group, gzip-encoded when it is large.

        Raises:
            RequestRefused: the group breaks the contract; sending it again is useless.
            ServiceUnavailable: not delivered within the deadline.
        """
        body = group.model_dump_json().encode()
        headers = {"content-type": "application/json"}
        if len(body) >= GZIP_FROM_BYTES:
            body = gzip.compress(body, compresslevel=1)
            headers["content-encoding"] = "gzip"
        return await self._request(
            "POST", "/scored_data", content=body, headers=headers, repeat_lost_answers=False
        )

    async def disconnect(self, env_id: int) -> None:
        await self._request("POST", "/disconnect-env", json={"env_id": env_id})

    async def _request(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        return _json_object(await self._send(method, path, **request))


def _json_object(response: httpx.Response) -> dict[str, Any]:
    try:
        answer = response.json()
    except ValueError as error:
        raise ProtocolViolation(
            f"{SERVICE}: {response.request.url} answered no JSON; is the URL that of run-api?"
        ) from error
    if not isinstance(answer, dict):
        raise ProtocolViolation(f"{SERVICE}: {response.request.url} answered no JSON object")
    return answer


def _parse(model: type[M], answer: dict[str, Any]) -> M:
    try:
        return model.model_validate(answer)
    except ValidationError as error:
        raise ProtocolViolation(f"{SERVICE}: an answer breaks the contract: {error}") from error
