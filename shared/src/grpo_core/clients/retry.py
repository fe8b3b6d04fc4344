"""The one place that decides which failed requests are sent again, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_delay,
    wait_exponential_jitter,
)

from grpo_core.errors import RequestRefused, ServiceUnavailable

RETRIED_STATUS = frozenset({408, 502, 503, 504})
_NOT_CARRIED_OUT = frozenset({408, 503})
"""The others come from a gateway that lost the answer of a service which may have worked."""
_MAX_RETRY_AFTER_S = 30.0


class TransientAnswer(Exception):
    """408, 502, 503, 504: there but not ready. Never leaves the callers of this module."""

    def __init__(self, message: str, status: int, retry_after_s: float) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


def check_answer(response: httpx.Response, service: str) -> None:
    """Raise for every answer that is not a success.

    Raises:
        TransientAnswer: 408, 502, 503, 504.
        RequestRefused: any other 4xx, with the server's explanation.
        ServiceUnavailable: any other status.
    """
    if response.is_success:
        return
    where = f"{service}: {response.request.method} {response.request.url}"
    detail = f"{where} answered {response.status_code}: {response.text[:2000]}"
    if response.status_code in RETRIED_STATUS:
        raise TransientAnswer(detail, response.status_code, _retry_after_s(response))
    if response.is_client_error:
        raise RequestRefused(detail, response.status_code, _problem_kinds(response))
    raise ServiceUnavailable(detail)


def is_safe_to_repeat(error: BaseException) -> bool:
    """True where the request did not reach the service, or the service asked for a repeat."""
    if isinstance(error, TransientAnswer):
        return error.status in _NOT_CARRIED_OUT
    return isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)


def is_transient(error: BaseException) -> bool:
    """True for any broken connection: right for requests that may be repeated without harm."""
    return isinstance(error, httpx.TransportError | TransientAnswer)


Note = Callable[[BaseException], None]
"""Called with the error of an attempt that is repeated."""


def _ignore(_error: BaseException) -> None:
    """For callers that need no note."""


def retrying(
    deadline_s: float, retry_on: Callable[[BaseException], bool], note: Note = _ignore
) -> Retrying:
    """A synchronous retry loop that gives up after `deadline_s` seconds, re-raising the last."""
    return Retrying(**_policy(deadline_s, retry_on, note))


def async_retrying(
    deadline_s: float, retry_on: Callable[[BaseException], bool], note: Note = _ignore
) -> AsyncRetrying:
    """The same for coroutines."""
    return AsyncRetrying(**_policy(deadline_s, retry_on, note))


def _policy(
    deadline_s: float, retry_on: Callable[[BaseException], bool], note: Note
) -> dict[str, Any]:
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
    """The named error for a deadline that passed."""
    if isinstance(error, httpx.ReadTimeout):
        seconds = error.request.extensions["timeout"]["read"]
        return ServiceUnavailable(
            f"{service} at {url} took a request and did not answer within {seconds:g} s; it has "
            "too much to do, or the deadline is too short for what was asked"
        )
    reason = str(error) or type(error).__name__
    return ServiceUnavailable(
        f"{service} not reachable at {url} for {deadline_s:g} s ({reason}); check that it runs and "
        "that the URL is right"
    )


_backoff = wait_exponential_jitter(multiplier=0.1, max=5.0, jitter=0.1)


def _wait(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    asked = error.retry_after_s if isinstance(error, TransientAnswer) else 0.0
    return max(asked, _backoff(state))


def _problem_kinds(response: httpx.Response) -> frozenset[str]:
    """The types in `{"detail": [{"loc": ..., "msg": ..., "type": ...}]}`; none in other bodies."""
    try:
        detail = response.json()["detail"]
        return frozenset(str(problem["type"]) for problem in detail)
    except (ValueError, KeyError, TypeError):
        return frozenset()


def _retry_after_s(response: httpx.Response) -> float:
    try:
        return min(float(response.headers.get("retry-after", 0)), _MAX_RETRY_AFTER_S)
    except ValueError:
        return 0.0
