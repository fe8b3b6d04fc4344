"""Groups sent by hand: with an Idempotency-Key of our choice, through whichever replica answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import httpx

from grpo_core.closing import ClosesOnAsyncExit
from grpo_core.errors import ProtocolViolation, RequestRefused, ServiceUnavailable

SERVICE = "run-api"
_ATTEMPT_S = 30.0
_REPEAT_EVERY_S = 0.1
_UNAVAILABLE = 503


class KeyedSender(ClosesOnAsyncExit):
    """Args:
    urls: the replicas, tried in turn.
    deadline_s: how long one call may keep trying before `ServiceUnavailable`.
    """

    def __init__(self, urls: Sequence[str], deadline_s: float) -> None:
        self._urls = urls
        self._deadline_s = deadline_s
        self._http = httpx.AsyncClient(timeout=_ATTEMPT_S)

    async def close(self) -> None:
        await self._http.aclose()

    async def send(self, path: str, body: bytes, key: str) -> Any:
        """POST until an answer comes; every repeat goes to the other replica.

        Raises:
            RequestRefused: 4xx.
            ProtocolViolation: a status that is neither 2xx, 4xx nor 503.
            ServiceUnavailable: no such answer within the deadline.
        """
        give_up_at = time.monotonic() + self._deadline_s
        for url in cycle(self._urls):
            try:
                response = await self._post(url + path, body, key, _ATTEMPT_S)
            except httpx.TransportError as error:
                failure = f"{type(error).__name__} {error}"
            else:
                if response.status_code != _UNAVAILABLE:
                    return _answer(response)
                failure = response.text
            if time.monotonic() > give_up_at:
                break
            await asyncio.sleep(_REPEAT_EVERY_S)
        raise ServiceUnavailable(f"{SERVICE}: {path} failed for {self._deadline_s:g} s: {failure}")

    async def hang_up(self, path: str, body: bytes, key: str, after_s: float) -> Any:
        """POST once and close the connection where no answer came within `after_s` seconds.

        Raises:
            ServiceUnavailable: none did, or the connection broke.
            RequestRefused, ProtocolViolation: as `send`.
        """
        try:
            response = await self._post(self._urls[0] + path, body, key, after_s)
        except httpx.TransportError as error:
            raise ServiceUnavailable(f"{SERVICE}: hung up: {type(error).__name__}") from error
        if response.status_code == _UNAVAILABLE:
            raise ServiceUnavailable(f"{SERVICE}: {response.text}")
        return _answer(response)

    async def _post(self, url: str, body: bytes, key: str, read_s: float) -> httpx.Response:
        headers = {"content-type": "application/json", "idempotency-key": key}
        timeout = httpx.Timeout(_ATTEMPT_S, read=read_s)
        return await self._http.post(url, content=body, headers=headers, timeout=timeout)


def _answer(response: httpx.Response) -> Any:
    said = f"{SERVICE}: {response.request.url.path} answered {response.status_code}: "
    if response.is_client_error:
        raise RequestRefused(said + response.text[:500], response.status_code)
    if not response.is_success:
        raise ProtocolViolation(said + response.text[:500])
    return response.json()
