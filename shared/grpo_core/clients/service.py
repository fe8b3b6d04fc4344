"""Base HTTP clients with a deadline, retries, and errors that name the service."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from typing import Any

import httpx
import structlog

from grpo_core.clients.retry import (
    TransientAnswer,
    async_retrying,
    check_answer,
    is_safe_to_repeat,
    is_transient,
    retrying,
    unavailable,
)
from grpo_core.closing import ClosesOnAsyncExit, ClosesOnExit
from grpo_core.errors import AnswerLost, ServiceUnavailable
from grpo_core.security import authorization

Rule = Callable[[BaseException], bool]
"""Whether a request is retried after an error."""
log = structlog.get_logger()

CONNECT_S = 10.0
"""Limit on opening a connection, independent of the limit on the answer."""
_LEAST_S = 1.0


class Reachability:
    """Logs once that a service cannot be reached, and once that it can be again.

    Args:
        hint: the fix to log; None to log nothing
    """

    def __init__(self, service: str, url: str, hint: str | None) -> None:
        self._service, self._url, self._hint = service, url, hint
        self._is_away = False

    def failed(self, error: BaseException) -> None:
        if self._hint is None or self._is_away or not isinstance(error, httpx.ConnectError):
            return
        self._is_away = True
        log.warning(
            "service.unreachable",
            name=self._service,
            url=self._url,
            reason=str(error),
            hint=self._hint,
        )

    def answered(self) -> None:
        if self._is_away:
            self._is_away = False
            log.info("service.reachable", name=self._service, url=self._url)


class ServiceClient(ClosesOnExit):
    """A blocking HTTP client of one service.

    Args:
        service: its name in messages
        base_url: a trailing /v1 is dropped
        deadline_s: how long one call may retry
        timeout_s: limit on one attempt
        token: sent with every request; None if the service needs none
        hint: the fix to log if nothing listens at the URL; None to log nothing

    `has_ended`: returns true once the service has ended, so that a retry is useless.
    """

    def __init__(
        self,
        service: str,
        base_url: str,
        deadline_s: float,
        timeout_s: float,
        token: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.base_url = _bare(base_url)
        self._service = service
        self._deadline_s = deadline_s
        self._reachability = Reachability(service, self.base_url, hint)
        self.has_ended: Callable[[], bool] = lambda: False
        self._http = httpx.Client(
            base_url=self.base_url, timeout=_timeout(timeout_s), headers=authorization(token)
        )

    def close(self) -> None:
        self._http.close()

    def send(
        self,
        method: str,
        path: str,
        repeat_lost_answers: bool = True,
        deadline_s: float | None = None,
        **request: Any,
    ) -> httpx.Response:
        """Send a request, and retry it for `deadline_s` seconds or the client's own deadline.

        Args:
            repeat_lost_answers: retry even if the service may have carried out the request.
        Raises:
            RequestRefused: the service answered 4xx.
            AnswerLost: the connection broke after a request that must not be repeated.
            ServiceUnavailable: no 2xx answer within the deadline.
        """
        deadline_s, rule = deadline_s or self._deadline_s, _rule(repeat_lost_answers)
        try:
            for attempt in retrying(
                deadline_s, lambda e: rule(e) and not self.has_ended(), self._reachability.failed
            ):
                with attempt:
                    response = self._http.request(method, path, **request)
                    check_answer(response, self._service)
        except (httpx.TransportError, TransientAnswer) as error:
            if self.has_ended():
                raise ServiceUnavailable(
                    f"{self._service} at {self.base_url} has ended ({error}); read the log of "
                    f"{self._service}"
                ) from error
            raise _failure(
                self._service, self.base_url, deadline_s, error, repeat_lost_answers
            ) from error
        self._reachability.answered()
        return response


class AsyncServiceClient(ClosesOnAsyncExit):
    """The same for coroutines. `max_connections`: limit on concurrent requests."""

    def __init__(
        self,
        service: str,
        base_url: str,
        deadline_s: float,
        timeout_s: float,
        max_connections: int = 100,
        token: str | None = None,
        hint: str | None = None,
    ) -> None:
        # Not above: the import takes longer than a command with a mistake should.
        from grpo_core.clients.aiohttp_transport import AiohttpTransport

        self.base_url = _bare(base_url)
        self._service = service
        self._deadline_s = deadline_s
        self._reachability = Reachability(service, self.base_url, hint)
        self._transport = AiohttpTransport(self.base_url, max_connections)
        self._http = httpx.AsyncClient(
            headers=authorization(token) | _basic_authorization(self.base_url),
            timeout=_timeout(timeout_s),
            transport=self._transport,
        )
        self._urls: dict[str, httpx.URL] = {}

    async def close(self) -> None:
        await self._http.aclose()

    async def send(
        self,
        method: str,
        path: str,
        repeat_lost_answers: bool = True,
        deadline_s: float | None = None,
        **request: Any,
    ) -> httpx.Response:
        """As `ServiceClient.send`."""
        deadline_s = deadline_s or self._deadline_s
        try:
            rule, note = _rule(repeat_lost_answers), self._reachability.failed
            async for attempt in async_retrying(deadline_s, rule, note):
                with attempt:
                    response = await self.send_once(method, path, **request)
        except (httpx.TransportError, TransientAnswer) as error:
            raise _failure(
                self._service, self.base_url, deadline_s, error, repeat_lost_answers
            ) from error
        self._reachability.answered()
        return response

    async def send_once(
        self, method: str, path: str, answer_s: float | None = None, **request: Any
    ) -> httpx.Response:
        """Send a request once. `answer_s`: replaces the client's limit.

        Raises:
            httpx.TransportError, TransientAnswer: a repeat may succeed.
            RequestRefused, ServiceUnavailable: as `check_answer`.
        """
        if answer_s is not None:
            request["timeout"] = _timeout(max(answer_s, _LEAST_S))
        if path not in self._urls:
            self._urls[path] = httpx.URL(self.base_url + path)
        built = self._http.build_request(method, self._urls[path], **request)
        # The client's own send takes half as much CPU time as the transport, for redirects.
        response = await self._transport.handle_async_request(built)
        await response.aread()
        if "set-cookie" in response.headers:
            self._http.cookies.extract_cookies(response)
        check_answer(response, self._service)
        return response


def _basic_authorization(base_url: str) -> dict[str, str]:
    """The header for credentials in the URL; empty if it has none."""
    url = httpx.URL(base_url)
    if not url.userinfo:
        return {}
    credentials = f"{url.username}:{url.password}".encode()
    return {"authorization": f"Basic {b64encode(credentials).decode()}"}


def _failure(
    service: str, url: str, deadline_s: float, error: Exception, repeated: bool
) -> ServiceUnavailable:
    if repeated or is_safe_to_repeat(error):
        return unavailable(service, url, deadline_s, error)
    return AnswerLost(
        f"{service} at {url}: the connection broke before a response arrived "
        f"({str(error) or type(error).__name__}); the request may have been carried out"
    )


def _rule(repeat_lost_answers: bool) -> Rule:
    return is_transient if repeat_lost_answers else is_safe_to_repeat


def _timeout(seconds: float) -> httpx.Timeout:
    """No limit on waiting for a free connection of the client."""
    return httpx.Timeout(seconds, connect=min(seconds, CONNECT_S), pool=None)


def _bare(base_url: str) -> str:
    return base_url.rstrip("/").removesuffix("/v1")
