"""Records stop signals such as Ctrl-C, so that the code can stop at safe points.

A handler that raises could interrupt the code that starts or ends child processes. So the handler
only counts, and every wait checks the count.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Self

from grpo_core.errors import GrpoError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequested(GrpoError):
    """The command received a stop signal."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped by {number.name}")
        self.exit_status = 128 + number


class StopRequest:
    """Counts stop signals while the context is open. On exit the previous handlers are restored."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def check(self) -> None:
        """Raises `StopRequested` once a signal has arrived."""
        if self.received:
            raise StopRequested(self.received[0])

    @property
    def is_urgent(self) -> bool:
        """True after a second signal: stop without waiting."""
        return len(self.received) > 1

    def __enter__(self) -> Self:
        for number in STOP_SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # started under nohup: the run outlives the terminal
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
