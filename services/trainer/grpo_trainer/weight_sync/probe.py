"""Sends the requests of the trainer's checks to one of several inference servers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

import structlog

from grpo_core.clients.inference import BridgeClient
from grpo_core.deadline import Deadline
from grpo_core.errors import GrpoError, ServiceUnavailable
from grpo_core.weights.servers import REPORT_EVERY_S
from grpo_trainer.errors import EngineCrashed
from grpo_trainer.weight_sync.base import POLL_S, CheckedServer
from grpo_trainer.weight_sync.servers import ServerWatch

log = structlog.get_logger()

T = TypeVar("T")


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

    def _while_serving(self, request: str, ask: Callable[[], T]) -> T:
        self._patience = Deadline(self._patience_s, self._watch.clock)
        try:
            return super()._while_serving(request, lambda: self._unless_gone(ask))
        except (ServiceUnavailable, EngineCrashed) as error:
            if not self._others_serve():
                raise
            raise self._silent(error) from error

    def _unless_gone(self, ask: Callable[[], T]) -> T:
        """The answer. A process that was stopped accepts requests and never answers, so they are
        sent in a thread. Raises `ServerLeft` if the server is gone meanwhile, or takes too long
        while others serve."""
        answer: Future[T] = Future()

        def work() -> None:
            try:
                answer.set_result(ask())
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
