"""Clients of run-api: one for trainers (blocking), one for environments (async)."""

from __future__ import annotations

import gzip
import time
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from pydantic import ValidationError

from grpo_core.errors import ProtocolViolation, ServiceUnavailable
from grpo_core.retry import (
    TransientAnswer,
    async_retrying,
    check_answer,
    is_safe_to_repeat,
    is_transient,
    retrying,
    unavailable,
)
from grpo_core.wire import (
    EnvironmentRegistration,
    EnvironmentStatus,
    Registration,
    ScoredGroup,
    ServerStatus,
    TrainerInfo,
    WireModel,
)

SERVICE = "Atropos API"
"""Name in messages: users search for "Atropos API not reachable"."""

GZIP_FROM_BYTES = 1024
_REQUEST_TIMEOUT_S = 60.0
_POLL_S = 0.05

M = TypeVar("M", bound=WireModel)


class TrainerClient:
    """What a trainer asks of run-api.

    Args:
        base_url: for example http://127.0.0.1:8000
        deadline_s: how long one call may keep trying before `ServiceUnavailable`.
    """

    def __init__(self, base_url: str, deadline_s: float = 60.0) -> None:
        self.base_url = base_url.rstrip("/")
        self._deadline_s = deadline_s
        self._http = httpx.Client(base_url=self.base_url, timeout=_REQUEST_TIMEOUT_S)

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

    def status(self) -> ServerStatus:
        return _parse(ServerStatus, self._request("GET", "/status"))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

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

    def _request(
        self,
        method: str,
        path: str,
        json: dict[str, Any] | None = None,
        repeat_lost_answers: bool = True,
    ) -> dict[str, Any]:
        retry_on = is_transient if repeat_lost_answers else is_safe_to_repeat
        try:
            for attempt in retrying(self._deadline_s, retry_on):
                with attempt:
                    response = self._http.request(method, path, json=json)
                    check_answer(response, SERVICE)
        except (httpx.TransportError, TransientAnswer) as error:
            raise unavailable(SERVICE, self.base_url, self._deadline_s, error) from error
        return _json_object(response)


class EnvironmentClient:
    """What an environment asks of run-api."""

    def __init__(self, base_url: str, deadline_s: float = 60.0) -> None:
        self.base_url = base_url.rstrip("/")
        self._deadline_s = deadline_s
        self._http = httpx.AsyncClient(base_url=self.base_url, timeout=_REQUEST_TIMEOUT_S)

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

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _request(
        self,
        method: str,
        path: str,
        json: dict[str, Any] | None = None,
        content: bytes | None = None,
        headers: dict[str, str] | None = None,
        repeat_lost_answers: bool = True,
    ) -> dict[str, Any]:
        retry_on = is_transient if repeat_lost_answers else is_safe_to_repeat
        try:
            async for attempt in async_retrying(self._deadline_s, retry_on):
                with attempt:
                    response = await self._http.request(
                        method, path, json=json, content=content, headers=headers
                    )
                    check_answer(response, SERVICE)
        except (httpx.TransportError, TransientAnswer) as error:
            raise unavailable(SERVICE, self.base_url, self._deadline_s, error) from error
        return _json_object(response)


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
