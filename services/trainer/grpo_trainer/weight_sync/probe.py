"""Sends the requests of the trainer's checks to an inference server, and repeats them while its
engine restarts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

import structlog

from grpo_core.clients.inference import BridgeClient, Completion
from grpo_core.deadline import Deadline
from grpo_core.errors import GrpoError, ServiceUnavailable
from grpo_core.weights.servers import REPORT_EVERY_S
from grpo_trainer.errors import EngineCrashed
from grpo_trainer.weight_sync.base import POLL_S
from grpo_trainer.weight_sync.servers import ServerWatch

log = structlog.get_logger()

T = TypeVar("T")

PROBE_DEADLINE_S = 30.0
TOLERATED_CRASHES = 1
"""Anything may end an engine once. If it crashes again, the request is the likely cause."""


class CheckedServer:
    """A vllm-server that receives the requests of checks."""

    bridge: BridgeClient

    def crashes(self) -> int:
        """Number of crashes of the engine that are known now."""
        raise NotImplementedError

    def await_serving(self) -> None:
        """Wait until the server serves the policy's weights. Raises `LostServer`."""
        raise NotImplementedError

    def answer(self, send: Callable[[], T]) -> T:
        return send()

    def served_logprobs(self, token_ids: list[int]) -> list[float]:
        """The server's logprobs of token_ids[1:]: [T] → [T-1]. Raises the errors of `ask`."""
        request = f"the logprobs of {len(token_ids)} tokens"
        return self.ask(request, lambda: self.bridge.prompt_logprobs(token_ids))

    def sample(self, prompt_token_ids: list[int], max_tokens: int) -> Completion:
        """Sample exactly `max_tokens` tokens at temperature 1. Raises the errors of `ask`."""
        return self.ask(
            f"{max_tokens} sampled tokens after a prompt of {len(prompt_token_ids)} tokens",
            lambda: self.bridge.sample(
                prompt_token_ids, max_tokens=max_tokens, temperature=1.0, ignore_eos=True
            ),
        )

    def ask(self, request: str, send: Callable[[], T]) -> T:
        """Repeat a request until the server answers. The time during which it is down does not
        count.

        Args:
            request: what is asked for, in messages
            send: retries too, for a few seconds, so the engine may also have crashed if it succeeds

        Raises:
            ServiceUnavailable: a running server does not answer for 30 s.
            EngineCrashed: the request crashes the engine.
            LostServer: the server stopped and did not come back in time.
        """
        self.await_serving()
        deadline, seen = Deadline(PROBE_DEADLINE_S), self.crashes()
        most = seen + TOLERATED_CRASHES
        while True:
            failure = None
            try:
                answer = self.answer(send)
            except ServiceUnavailable as error:
                failure = error
            known, seen = seen, _noted(request, self.crashes(), seen, most)
            if failure is None:
                return answer
            with deadline.suspended():
                self.await_serving()
            seen = _noted(request, self.crashes(), seen, most)
            if seen > known:
                deadline = Deadline(PROBE_DEADLINE_S)  # for the new engine
            elif deadline.has_passed:
                raise failure
            time.sleep(POLL_S)


def _noted(request: str, crashes: int, seen: int, most: int) -> int:
    """The number of crashes, which is logged if it rose.

    Raises:
        EngineCrashed: there are more than `most`.
    """
    if crashes > most:
        raise EngineCrashed(
            f"the server's engine crashed {crashes - most + TOLERATED_CRASHES} times while the "
            f"trainer waited for {request}, so this request probably crashes it. Read the lines "
            "before engine.crashed in the server's log (logs/vllm-server.log of a local run; "
            "vllm_server.log in --save-path if grpo started the server), and start again"
        )
    if crashes > seen:
        log.warning(
            "engine.crashed_during_check",
            request=request,
            hint="the trainer repeats the request once; read the server's log",
        )
    return crashes


class ServerLeft(GrpoError):
    """A server left, or does not answer, while others serve. `cause`: the error if none is left."""

    def __init__(self, name: str, cause: Exception | None = None) -> None:
        told = f"the inference server {name} left while the trainer waited for its answer"
        super().__init__(told)
        self.name = name
        self.cause = cause or ServiceUnavailable(told)


class ServerProbe(CheckedServer):
    """Args:
    name: of the server
    bridge: its client
    patience_s: how long an answer may take if other servers serve, restarts included
    """

    def __init__(
        self, name: str, bridge: BridgeClient, watch: ServerWatch, patience_s: float
    ) -> None:
        self.name = name
        self.bridge = bridge
        self._watch = watch
        self._patience_s = patience_s
        self._patience = Deadline(patience_s, watch.clock)
        self._crashes = 0

    def crashes(self) -> int:
        status = self._watch.servers().get(self.name)
        if status is not None:
            self._crashes = status.crashes
        return self._crashes

    def await_serving(self) -> None:
        """Wait until this server serves.

        Raises:
            ServerLeft: it is gone, or does not return soon, and another one serves.
            LostServer: no server returns in time.
        """
        while self.name not in self._watch.await_serving():
            if self.name not in self._watch.servers():
                raise ServerLeft(self.name)
            if self._patience.has_passed:
                raise self._silent(None)
            self._watch.sleep(POLL_S)

    def ask(self, request: str, send: Callable[[], T]) -> T:
        """Raises `ServerLeft` too: instead of the errors of one server, if another one serves."""
        self._patience = Deadline(self._patience_s, self._watch.clock)
        try:
            return super().ask(request, send)
        except (ServiceUnavailable, EngineCrashed) as error:
            if not self._others_serve():
                raise
            raise self._silent(error) from error

    def answer(self, send: Callable[[], T]) -> T:
        """A process that was stopped accepts requests and never answers, so they are sent in a
        thread. Raises `ServerLeft` if the server is gone meanwhile, or takes too long while others
        serve."""
        answer: Future[T] = Future()

        def work() -> None:
            try:
                answer.set_result(send())
            except Exception as error:  # noqa: BLE001 - the other thread raises it
                answer.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        while True:
            is_done = bool(wait([answer], REPORT_EVERY_S).done)
            found = answer.exception() if is_done else None
            error = found if isinstance(found, ServiceUnavailable) else None
            if is_done and error is None:
                return answer.result()
            if self.name not in self._watch.servers():
                raise ServerLeft(self.name)
            if self._patience.has_passed and self._others_serve():
                raise self._silent(error)
            if error is not None:
                raise error

    def _others_serve(self) -> bool:
        return any(one.serves for name, one in self._watch.servers().items() if name != self.name)

    def _silent(self, error: Exception | None) -> ServerLeft:
        self._watch.unanswered += 1
        log.warning(
            "server.unanswered",
            server=self.name,
            reason=str(error) if error else f"no answer within {self._patience_s:g} s",
            hint="the trainer checks another server; read this server's log",
        )
        return ServerLeft(self.name, error)
