"""Two hosts of a run, joined by a network: namespaces of the kernel.

This thread enters the first one, with all that it starts from then on. Only for root.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_core.process import ManagedProcess
from tests.support.wait import wait_for
from tests.whole_run.commands import FIRST_NODE
from tests.whole_run.matrix.network import DROP, rule, run

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000
_OWN = "/proc/thread-self/ns/net"
_LINK, _SECOND_NODE = "second", "10.0.0.2"


class Hosts:
    """Args: directory: for a log"""

    def __init__(self, directory: Path) -> None:
        self._before = os.open(_OWN, os.O_RDONLY)
        _require(_LIBC.unshare(_CLONE_NEWNET))
        run("ip", "link", "set", "lo", "up")
        sleep = ["unshare", "--net", "sleep", "infinity"]
        self._second = ManagedProcess("second host", sleep, directory / "second-host.log")
        there = Path(f"/proc/{self._second.pid}/ns/net")
        wait_for(lambda: there.readlink() != Path(_OWN).readlink())
        peer = ("peer", "name", _LINK, "netns", str(self._second.pid))
        run("ip", "link", "add", _LINK, "type", "veth", *peer)
        for prefix, address in (((), FIRST_NODE), (self.second, _SECOND_NODE)):
            run(*prefix, "ip", "address", "add", f"{address}/24", "dev", _LINK)
            run(*prefix, "ip", "link", "set", _LINK, "up")
        run(*self.second, "ip", "link", "set", "lo", "up")

    @property
    def second(self) -> tuple[str, ...]:
        """Before the words of a command: it runs on the second host."""
        return ("nsenter", f"--net=/proc/{self._second.pid}/ns/net")

    @contextmanager
    def parted(self) -> Iterator[None]:
        """No packet of the second host arrives."""
        with rule("INPUT", "--in-interface", _LINK, *DROP):
            yield

    def close(self) -> None:
        self._second.kill()
        _require(_LIBC.setns(self._before, _CLONE_NEWNET))
        os.close(self._before)


def _require(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), "network namespaces need root")
