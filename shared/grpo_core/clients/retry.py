"""Decides which failed HTTP requests are retried, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_delay,
    wait_exponential_jitter,
)

from grpo_core.errors import RequestRefused, ServiceUnavailable

RETRIED_STATUS = frozenset({408, 502, 503, 504})
_NOT_CARRIED_OUT = frozenset({408, 503})
"""502 and 504 come from a gateway; the service may have carried out the request."""
_MAX_RETRY_AFTER_S = 30.0
_MAX_REASON_CHARS = 2000


class TransientAnswer(Exception):
    """A status that is worth a retry: 408, 502, 503 or 504. Clients convert it."""

    def __init__(self, message: str, status: int, retry_after_s: float) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


def check_answer(response: httpx.Response, service: str) -> None:
    """Raise for every status other than 2xx.

    Raises:
        TransientAnswer: 408, 502, 503, 504.
        RequestRefused: any other 4xx; the message contains the server's reason.
        ServiceUnavailable: any other status.
    """
    if response.is_success:
        return
    where = f"{service}: {response.request.method} {response.request.url}"
    detail = f"{where} was answered with status {response.status_code}: {_reason(response)}"
    if response.status_code in RETRIED_STATUS:
        raise TransientAnswer(detail, response.status_code, _retry_after_s(response))
    if response.is_client_error:
        raise RequestRefused(detail, response.status_code, _problem_kinds(response))
    raise ServiceUnavailable(detail)


def is_safe_to_repeat(error: BaseException) -> bool:
    """Whether the request did not reach the service, or the service asked for a repeat."""
    if isinstance(error, TransientAnswer):
        return error.status in _NOT_CARRIED_OUT
    return isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)


def is_transient(error: BaseException) -> bool:
    """Whether the error may be temporary. Only for requests that can be repeated safely."""
    return isinstance(error, httpx.TransportError | TransientAnswer)


def async_retrying(
    deadline_s: float,
    retry_on: Callable[[BaseException], bool],
    note: Callable[[BaseException], None],
) -> AsyncRetrying:
    """A retry loop for coroutines. See `retry_policy`."""
    return AsyncRetrying(**retry_policy(deadline_s, retry_on, note))


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


def _reason(response: httpx.Response) -> str:
    """The reason in `{"detail": text}` or `{"detail": [{"loc", "msg"}]}`, else the whole answer."""
    try:
        detail = response.json()["detail"]
        if isinstance(detail, list):
            detail = "; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in detail)
    except (ValueError, KeyError, TypeError):
        detail = response.text
    return str(detail)[:_MAX_REASON_CHARS]


def _problem_kinds(response: httpx.Response) -> frozenset[str]:
    """The types in `{"detail": [{"loc": ..., "msg": ..., "type": ...}]}`; else an empty set."""
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
