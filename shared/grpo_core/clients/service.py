"""Base HTTP clients with a deadline, retries, and errors that name the service."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import structlog
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_delay,
    wait_exponential_jitter,
)

from grpo_core.closing import ClosesOnAsyncExit, ClosesOnExit
from grpo_core.errors import AnswerLost, RequestRefused, ServiceUnavailable
from grpo_core.protocol import PROTOCOL_HEADER, require_same_protocol
from grpo_core.security import authorization
from grpo_core.service_url import ServiceUrl
from grpo_core.sockets import SOCKET_OPTIONS, proxy_for

log = structlog.get_logger()

CONNECT_S = 10.0
"""Limit on opening a connection, independent of the limit on the answer."""
_LEAST_S = 1.0
RETRIED_STATUS = frozenset({408, 502, 503, 504})
_NOT_CARRIED_OUT = frozenset({408, 503})
"""502 and 504 come from a gateway; the service may have carried out the request."""
_MAX_RETRY_AFTER_S = 30.0
_MAX_REASON_CHARS = 2000
_SILENCE = (httpx.ConnectError, httpx.ReadError, httpx.TimeoutException)


class _Client:
    """What both clients have in common: the service's name and URL, and the rules of retries.

    `has_ended`: returns true once the service has ended, so that a retry is useless.
    """

    def __init__(self, service: str, base_url: str, deadline_s: float, hint: str | None) -> None:
        url = ServiceUrl(base_url).root
        self.base_url: str = url
        self._credentials = url.authorization()
        self._service, self._deadline_s, self._hint = service, deadline_s, hint
        self._is_away = False
        self.has_ended: Callable[[], bool] = lambda: False

    def _policy(self, deadline_s: float, repeat_lost_answers: bool) -> dict[str, Any]:
        def is_worth_it(error: BaseException) -> bool:
            is_transient = isinstance(error, httpx.TransportError | TransientAnswer)
            may_repeat = repeat_lost_answers or is_safe_to_repeat(error)
            return is_transient and may_repeat and not self.has_ended()

        return retry_policy(deadline_s, is_worth_it, self._note_absence)

    def _note_absence(self, error: BaseException) -> None:
        """Log once that nothing listens at the URL, or that it is silent."""
        if self._hint is None or self._is_away or not isinstance(error, _SILENCE):
            return
        self._is_away = True
        log.warning(
            "service.unreachable",
            name=self._service,
            url=self.base_url,
            reason=str(error) or type(error).__name__,
            hint=self._hint,
        )

    def _note_answer(self) -> None:
        if self._is_away:
            self._is_away = False
            log.info("service.reachable", name=self._service, url=self.base_url)

    def _failure(
        self, error: Exception, deadline_s: float, repeat_lost_answers: bool
    ) -> ServiceUnavailable:
        where = f"{self._service} at {self.base_url}"
        if self.has_ended():
            return ServiceUnavailable(
                f"{where} has ended ({error}); read the log of {self._service}"
            )
        if repeat_lost_answers or is_safe_to_repeat(error):
            return unavailable(self._service, self.base_url, deadline_s, error)
        return AnswerLost(
            f"{where}: the connection broke before a response arrived "
            f"({str(error) or type(error).__name__}); the request may have been carried out"
        )


class ServiceClient(_Client, ClosesOnExit):
    """A blocking HTTP client of one service.

    Args:
        service: its name in messages
        base_url: a trailing /v1 is dropped
        deadline_s: how long one call may retry
        timeout_s: limit on one attempt
        token: sent with every request; None if the service needs none
        hint: the fix to log if nothing listens at the URL; None to log nothing
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
        super().__init__(service, base_url, deadline_s, hint)
        self._http = httpx.Client(
            base_url=self.base_url,
            timeout=_timeout(timeout_s),
            headers=authorization(token) | self._credentials,
            transport=httpx.HTTPTransport(
                proxy=proxy_for(self.base_url), socket_options=SOCKET_OPTIONS
            ),
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
        deadline_s = deadline_s or self._deadline_s
        try:
            for attempt in Retrying(**self._policy(deadline_s, repeat_lost_answers)):
                with attempt:
                    response = self._http.request(method, path, **request)
                    check_answer(response, self._service)
        except (httpx.TransportError, TransientAnswer) as error:
            self._note_absence(error)
            raise self._failure(error, deadline_s, repeat_lost_answers) from error
        self._note_answer()
        return response


class AsyncServiceClient(_Client, ClosesOnAsyncExit):
    """The same for coroutines. `max_connections`: limit on concurrent requests; `address`: the one
    to connect to, of several of the URL's name."""

    def __init__(
        self,
        service: str,
        base_url: str,
        deadline_s: float,
        timeout_s: float,
        max_connections: int = 100,
        token: str | None = None,
        hint: str | None = None,
        address: str = "",
    ) -> None:
        # Not above: the import takes longer than a command with a mistake should.
        from grpo_core.clients.aiohttp_transport import AiohttpTransport

        super().__init__(service, base_url, deadline_s, hint)
        self._transport = AiohttpTransport(self.base_url, max_connections, address)
        self._http = httpx.AsyncClient(
            headers=authorization(token) | self._credentials,
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
            async for attempt in AsyncRetrying(**self._policy(deadline_s, repeat_lost_answers)):
                with attempt:
                    response = await self.send_once(method, path, **request)
        except (httpx.TransportError, TransientAnswer) as error:
            self._note_absence(error)
            raise self._failure(error, deadline_s, repeat_lost_answers) from error
        self._note_answer()
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


def _timeout(seconds: float) -> httpx.Timeout:
    """No limit on waiting for a free connection of the client."""
    return httpx.Timeout(seconds, connect=min(seconds, CONNECT_S), pool=None)


class TransientAnswer(Exception):
    """A status that is worth a retry: 408, 502, 503 or 504. Clients convert it."""

    def __init__(self, message: str, status: int, retry_after_s: float) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


def check_answer(response: httpx.Response, service: str) -> None:
    """Raise for every status other than 2xx.

    Raises:
        OtherProtocol: whatever the status.
        TransientAnswer: 408, 502, 503, 504.
        RequestRefused: any other 4xx; the message contains the server's reason.
        ServiceUnavailable: any other status.
    """
    require_same_protocol(response.headers.get(PROTOCOL_HEADER[0]), service)
    if response.is_success:
        return
    where = f"{service}: {response.request.method} {response.request.url}"
    reason, kinds = reason_and_kinds(response)
    detail = f"{where} was answered with status {response.status_code}: {reason}"
    if response.status_code in RETRIED_STATUS:
        raise TransientAnswer(detail, response.status_code, _retry_after_s(response))
    if response.is_client_error:
        raise RequestRefused(detail, response.status_code, kinds)
    raise ServiceUnavailable(detail)


def is_safe_to_repeat(error: BaseException) -> bool:
    """Whether the request did not reach the service, or the service asked for a repeat."""
    if isinstance(error, TransientAnswer):
        return error.status in _NOT_CARRIED_OUT
    return isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)


def retry_policy(
    deadline_s: float,
    retry_on: Callable[[BaseException], bool],
    note: Callable[[BaseException], None],
) -> dict[str, Any]:
    """Arguments of tenacity's loops: they re-raise the last error after `deadline_s` seconds.

    Args:
        note: called with the error of each attempt that is repeated
    """

    def before_sleep(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if error is not None:
            note(error)

    return {
        "stop": stop_after_delay(deadline_s),
        "wait": _wait,
        "retry": retry_if_exception(retry_on),
        "before_sleep": before_sleep,
        "reraise": True,
    }


def unavailable(service: str, url: str, deadline_s: float, error: Exception) -> ServiceUnavailable:
    """The error to raise after the deadline has passed."""
    if isinstance(error, httpx.ReadTimeout):
        seconds = error.request.extensions["timeout"]["read"]
        return ServiceUnavailable(
            f"{service} at {url} accepted a request but did not answer within {seconds:g} s; "
            "the service is overloaded, or the deadline is too short for this request"
        )
    reason = str(error) or type(error).__name__
    return ServiceUnavailable(
        f"{service} not reachable at {url} for {deadline_s:g} s ({reason}); check that "
        "the service runs and that the URL is right"
    )


_backoff = wait_exponential_jitter(multiplier=0.1, max=5.0, jitter=0.1)


def _wait(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    asked = error.retry_after_s if isinstance(error, TransientAnswer) else 0.0
    return max(asked, _backoff(state))


def reason_and_kinds(response: httpx.Response) -> tuple[str, frozenset[str]]:
    """Texts and types of the problems in `{"detail": [{"loc", "msg", "type"}]}`; the text of
    `{"detail": text}`, else the whole answer."""
    kinds: frozenset[str] = frozenset()
    try:
        detail = response.json()["detail"]
        if isinstance(detail, list):
            kinds = frozenset(str(problem.get("type")) for problem in detail)
            detail = "; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in detail)
    except (ValueError, KeyError, TypeError, AttributeError):
        detail = response.text
    return str(detail)[:_MAX_REASON_CHARS], kinds


def _retry_after_s(response: httpx.Response) -> float:
    try:
        return min(float(response.headers.get("retry-after", 0)), _MAX_RETRY_AFTER_S)
    except ValueError:
        return 0.0
