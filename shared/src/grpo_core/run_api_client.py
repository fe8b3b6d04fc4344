"""Clients of run-api: one for trainers (blocking), one for environments (async)."""

from __future__ import annotations

import gzip
import hashlib
import time
from collections.abc import Callable
from typing import Any, TypeVar

import httpx
import structlog
from pydantic import ValidationError

from grpo_core.errors import AnswerLost, ProtocolViolation, ServiceUnavailable
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

_log = structlog.get_logger()

M = TypeVar("M", bound=WireModel)


class TrainerClient(ServiceClient):
    """What a trainer asks of run-api.

    Args:
        base_url: for example http://127.0.0.1:8000
        deadline_s: how long one call may keep trying before `ServiceUnavailable`.
    """

    def __init__(self, base_url: str, deadline_s: float = 60.0) -> None:
        super().__init__(SERVICE, base_url, deadline_s, _REQUEST_TIMEOUT_S)
        self._registration: Registration | None = None
        self._last_batch = b""
        self._asked_again = False

    def register(self, registration: Registration) -> int:
        """Announce the run; returns the trainer's id.

        Raises:
            ServiceUnavailable: run-api did not answer in time.
            RequestRefused: the registration conflicts with the run in progress.
        """
        self._registration = registration
        answer = self._request("POST", "/register", json=registration.model_dump())
        return int(answer["uuid"])

    def next_batch(
        self, deadline_s: float, meanwhile: Callable[[], None] = lambda: None
    ) -> list[ScoredGroup]:
        """Wait for the next batch; `meanwhile` is called between the polls, and the time that it
        takes does not count.

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
            began = time.monotonic()
            meanwhile()
            # What it waited for, such as a server that restarts, kept environments waiting too.
            give_up_at += time.monotonic() - began
            time.sleep(_POLL_S)

    def _try_batch(self) -> list[ScoredGroup] | None:
        try:
            response = self._send("GET", "/batch", repeat_lost_answers=False)
        except AnswerLost as error:
            self._ask_again(error)
            return None
        answer = _json_object(response)
        if answer.get("status") == "error":
            raise ProtocolViolation(
                f"{SERVICE}: {answer.get('message')} It knew this trainer before: somebody called "
                "/reset_data, or its Redis lost its data (does it run with --appendonly yes?)"
            )
        asked_again, self._asked_again = self._asked_again, False
        if answer["batch"] is None or (self._is_the_last_one(response.content) and asked_again):
            return None
        try:
            return [ScoredGroup.model_validate(group) for group in answer["batch"]]
        except ValidationError as error:
            raise ProtocolViolation(f"{SERVICE}: broken group in a batch: {error}") from error

    def _ask_again(self, error: AnswerLost) -> None:
        """Another poll would acknowledge a batch that never arrived. A trainer that registers
        again is handed out what it has not acknowledged, byte for byte."""
        if self._registration is None:
            raise error
        _log.warning("the answer to GET /batch was lost; registering again", reason=str(error))
        self.register(self._registration)
        self._asked_again = True

    def _is_the_last_one(self, body: bytes) -> bool:
        """After a lost answer that means: the request had not reached run-api, which now hands out
        again what has been received. The next poll acknowledges it."""
        digest, before = hashlib.blake2b(body).digest(), self._last_batch
        self._last_batch = digest
        return digest == before

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
