"""Asks inference servers whether they are healthy, and which policy they serve; from the answers
follows the standing of each server in the pool."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import httpx
import structlog
from pydantic import BaseModel

from grpo_core.clients.inference import SERVICE
from grpo_core.clients.service import AsyncServiceClient, TransientAnswer
from grpo_core.errors import (
    GrpoError,
    ProtocolViolation,
    RequestRefused,
    ServiceUnavailable,
    parsing,
)
from grpo_core.weights.model_files import PROBE_TEXT, token_ids
from grpo_core.wire.policy_version import PolicyVersion
from grpo_env.inference.places import Place

log = structlog.get_logger()

_ATTEMPT_S = 5.0
_NOT_FOUND = 404
_FIRST_RECHECK_S = 0.2
_LAST_RECHECK_S = 5.0
_RECHECK_SHARE = 0.1


class NotAnInferenceServer(GrpoError):
    """The server at `--inference-url` is not vllm-api-server."""


class SharedWeightsHaveOneServer(GrpoError):
    """`--inference-url` names several servers, but in `shared_vllm` a run has only one server."""


class ServerTokenizerDiffers(GrpoError):
    """Server and environment have different tokenizers, so the policy would get other texts."""


class _BridgeState(BaseModel):
    """The fields of `GET /bridge/info` that an environment reads."""

    name: str = ""
    shared_weights: bool = False
    policy_version: PolicyVersion | None = None


class _Tokens(BaseModel):
    tokens: list[int]


class HealthClient(AsyncServiceClient):
    """Probes one inference server.

    `name`: of the server; None until it was asked, "" if it has none. `asks_name`: whether the next
    probe asks.

    Args:
        others: number of the other servers that `--inference-url` names
        api_key: the server's API key; None if it needs none
        attempt_s: limit on one probe; a longer one is shortened
        tokenizer: of the environment, from transformers: compared with the server's
    """

    def __init__(
        self,
        place: Place,
        others: int = 0,
        api_key: str | None = None,
        attempt_s: float = _ATTEMPT_S,
        tokenizer: Any = None,
    ) -> None:
        attempt_s = min(_ATTEMPT_S, attempt_s)
        super().__init__(
            SERVICE, place.url, attempt_s, attempt_s, token=api_key, address=place.address
        )
        self.name: str | None = None
        self.asks_name = others > 0
        self._others = others
        self._tokenizer = tokenizer

    async def problem(self) -> Exception | None:
        """Query the server's health once. Returns None if it is healthy.

        Raises:
            SharedWeightsHaveOneServer: a trainer writes the server's weights in place, and
                `--inference-url` names other servers too.
            ServerTokenizerDiffers: it encodes a text in another way than the environment.
        """
        try:
            # A new connection each time: an open one does not tell whether a host is silent.
            await self.send_once("GET", "/health", headers={"connection": "close"})
            if self.asks_name and self.name is None:
                await self._ask_name()
            if self._tokenizer is not None:
                await self._require_same_tokenizer()
        except RequestRefused as error:
            return NotAnInferenceServer(
                f"{error}; {self.base_url} is not vllm-api-server; check --inference-url"
            )
        except (httpx.TransportError, TransientAnswer, ServiceUnavailable) as error:
            return error
        return None

    async def _ask_name(self) -> None:
        """A server without a bridge has no name, and weights of its own."""
        try:
            state = _bridge_state(await self.send_once("GET", "/bridge/info"))
        except RequestRefused as error:
            if error.status != _NOT_FOUND:
                raise
            state = _BridgeState()
        if state.shared_weights and self._others:
            raise SharedWeightsHaveOneServer(
                f"the trainer writes the weights of {self.base_url} in place, so the "
                f"{self._others} other servers of --inference-url would keep old weights; "
                "pass only one URL in --inference-url, or use a mode other than shared_vllm"
            )
        self.name = state.name

    async def _require_same_tokenizer(self) -> None:
        """Of the first healthy server here. One that does not answer this is not asked again."""
        own, body = token_ids(self._tokenizer, PROBE_TEXT), {"prompt": PROBE_TEXT}
        with suppress(RequestRefused, TransientAnswer):
            answer = await self.send_once(
                "POST", "/tokenize", json=body | {"add_special_tokens": False}
            )
            with parsing(f"{SERVICE}: the response from /tokenize is invalid"):
                served = _Tokens.model_validate_json(answer.content).tokens
            if served != own:
                raise ServerTokenizerDiffers(
                    f"{self.base_url} encodes {PROBE_TEXT!r} as {served}, but the tokenizer "
                    f"{self._tokenizer.name_or_path} of this environment as {own}; pass the "
                    "server's model as --model or --tokenizer. If it is that, upgrade the older of "
                    "server and environment"
                )
        self._tokenizer = None

    async def served_version(self) -> PolicyVersion | ServiceUnavailable | None:
        """The version of the served policy. None: the server has no bridge. The error: it did not
        answer."""
        try:
            return _bridge_state(await self.send("GET", "/bridge/info")).policy_version
        except (RequestRefused, ProtocolViolation):
            return None
        except ServiceUnavailable as error:
            return error


def _bridge_state(answer: httpx.Response) -> _BridgeState:
    with parsing(f"{SERVICE}: the response from /bridge/info is invalid"):
        return _BridgeState.model_validate_json(answer.content)


class PoolState(Enum):
    """How the pool treats a server.

    away ─▶ serving             a probe finds the server healthy after a probe failed
    serving ─▶ away             a request or a probe failed: the server restarts, and is waited for
    away ─▶ on trial            the server is healthy although a request failed: one request decides
    on trial ─▶ serving, away   that request was answered, or failed
    any ─▶ gone                 no connection, or not serving for too long: the server is skipped
    gone ─▶ serving, on trial   as from away

    The rest is what run-api lists:
    updating                    its engine restarts: the requests of its conversations wait at it
    closed                      it may not serve its policy, or has left: it is skipped
    """

    SERVING = auto()
    ON_TRIAL = auto()
    AWAY = auto()
    GONE = auto()
    UPDATING = auto()
    CLOSED = auto()


ANSWERING = (PoolState.SERVING, PoolState.ON_TRIAL)


@dataclass(eq=False)
class ServerStanding:
    """One server's standing; logs each change of it once. A new server is away until it is probed.

    reason: the newest problem.

    Args:
        gone_after_s: a server that has not served for so long is gone
        on_change: called after each change of the standing
        clock: in seconds
    """

    url: str
    gone_after_s: float
    on_change: Callable[[], None]
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self.standing = PoolState.AWAY
        self.reason = "not probed yet"
        self._not_serving_since = self.clock()
        self._answered_at = self._failed_at = -math.inf
        self._has_been_unhealthy = True
        """True if a probe failed since the last failed request, or nothing was tried yet."""
        self._logged = PoolState.SERVING

    @property
    def recheck_s(self) -> float:
        """Seconds until the next probe of a server that does not serve: a tenth of its outage,
        within limits."""
        share_s = _RECHECK_SHARE * (self.clock() - self._not_serving_since)
        return min(max(share_s, _FIRST_RECHECK_S), _LAST_RECHECK_S)

    def request_answered(self) -> None:
        self._answered_at = self.clock()
        self._serve()

    def request_failed(self, error: Exception) -> None:
        """Record a request that the server did not answer, or answered with status 5xx."""
        self._failed_at = self.clock()
        self._has_been_unhealthy = _is_unreachable(error)
        # A restart never answers with another status than 503.
        self._stop_serving(error, is_restart=not isinstance(error, ServiceUnavailable))

    def record_probe(self, problem: Exception | None, began_at: float) -> None:
        """Record a probe. `problem`: why the server is unhealthy; None if it is healthy."""
        if problem is not None:
            # A busy server may answer requests sooner than the probe.
            if self._answered_at < began_at or not isinstance(problem, httpx.TimeoutException):
                self._has_been_unhealthy = True
                self._stop_serving(problem, is_restart=True)
        elif self._has_been_unhealthy:
            self._serve()
        elif self.standing is not PoolState.SERVING and began_at >= self._failed_at:
            self._change(PoolState.ON_TRIAL)

    def _serve(self) -> None:
        self.reason = "healthy"
        self._change(PoolState.SERVING)
        if self._logged is not PoolState.SERVING:
            seconds = round(self.clock() - self._not_serving_since, 1)
            log.info("server.recovered", url=self.url, away_s=seconds)
            self._logged = PoolState.SERVING

    def _stop_serving(self, error: Exception, is_restart: bool) -> None:
        now = self.clock()
        self.reason = named(error)
        if self.standing is PoolState.SERVING:
            self._not_serving_since = now
        is_gone = (
            self.standing is PoolState.GONE
            or now - self._not_serving_since >= self.gone_after_s
            or _is_unreachable(error)
            or isinstance(error, NotAnInferenceServer)
        )
        self._change(PoolState.GONE if is_gone else PoolState.AWAY)
        self._log(PoolState.GONE if is_gone or not is_restart else PoolState.AWAY)

    def _change(self, standing: PoolState) -> None:
        if standing is not self.standing:
            self.standing = standing
            self.on_change()

    def _log(self, standing: PoolState) -> None:
        if self._logged is PoolState.GONE or self._logged is standing:
            return
        self._logged = standing
        if standing is PoolState.GONE:
            log.warning(
                "server.failed",
                url=self.url,
                reason=self.reason,
                hint="it gets requests again once it is healthy. If it does not come back: its log "
                "tells why; start it again at this URL, or leave the URL out of --inference-url",
            )
        else:
            log.info("server.unresponsive", url=self.url, reason=self.reason)


def _is_unreachable(error: Exception) -> bool:
    """Nothing listens, the name is not resolved, or the host is silent. A server that restarts
    keeps its socket open."""
    return isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)


def named(problem: Exception) -> str:
    return str(problem) or type(problem).__name__
