"""Ctrl-C and its relatives as a flag, read where stopping is safe.

A handler that raised could interrupt anything: the line between starting a child and remembering
it, or the very code that ends the children. So the handler counts, and every wait asks.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Self

from grpo_core.errors import GrpoError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequested(GrpoError):
    """Somebody asked this run to end."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped by {number.name}")
        self.exit_status = 128 + number


class StopRequest:
    """Counts stop signals while it is entered; the former handlers return on exit."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._former: dict[signal.Signals, signal._HANDLER] = {}

    def check(self) -> None:
        """Raises `StopRequested` once a signal has arrived."""
        if self.received:
            raise StopRequested(self.received[0])

    @property
    def is_urgent(self) -> bool:
        """True after a second signal: whoever sent it does not want to wait for a tidy end."""
        return len(self.received) > 1

    def __enter__(self) -> Self:
        for number in STOP_SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # started under nohup: the terminal may go, the run stays
            self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
