"""Sends the requests of the trainer's checks to one of several inference servers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from grpo_core.clients.inference import BridgeClient
from grpo_core.deadline import Deadline
from grpo_core.errors import GrpoError
from grpo_core.weights.servers import REPORT_EVERY_S
from grpo_trainer.weight_sync.base import POLL_S, CheckedServer
from grpo_trainer.weight_sync.servers import ServerWatch

T = TypeVar("T")


class ServerLeft(GrpoError):
    """A server left while others serve."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the inference server {name} left while the trainer waited for it")
        self.name = name


class ServerProbe(CheckedServer):
    """Args:
    name: of the server
    bridge: its client
    """

    def __init__(self, name: str, bridge: BridgeClient, watch: ServerWatch) -> None:
        self.name = name
        self.bridge = bridge
        self._watch = watch
        self._crashes = 0

    def crashes(self) -> int:
        status = self._watch.servers().get(self.name)
        if status is not None:
            self._crashes = status.crashes
        return self._crashes

    def await_serving(self) -> None:
        """Wait until this server serves.

        Raises:
            ServerLeft: it is gone, or does not return, and another one serves.
            LostServer: no server returns in time.
        """
        deadline = Deadline(self._watch.return_deadline_s, self._watch.clock)
        while self.name not in self._watch.await_serving():
            if self.name not in self._watch.servers() or deadline.has_passed:
                raise ServerLeft(self.name)
            self._watch.sleep(POLL_S)

    def _while_serving(self, request: str, ask: Callable[[], T]) -> T:
        return super()._while_serving(request, lambda: self._unless_gone(ask))

    def _unless_gone(self, ask: Callable[[], T]) -> T:
        """The answer. A process that was stopped accepts requests and never answers, so they are
        sent in a thread. Raises `ServerLeft` if the server is gone meanwhile."""
        answer: Future[T] = Future()

        def work() -> None:
            try:
                answer.set_result(ask())
            except Exception as error:  # noqa: BLE001 - the other thread raises it
                answer.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        while True:
            try:
                return answer.result(REPORT_EVERY_S)
            except TimeoutError:
                if not answer.done() and self.name not in self._watch.servers():
                    raise ServerLeft(self.name) from None
