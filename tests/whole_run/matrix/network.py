"""Faults of the link from one process to another, by the kernel's packet filter.

Only for a network namespace of its own: every link has an address in 127.0.0.0/8, which the kernel
translates to 127.0.0.1. So the packets of one client can be dropped, those of others pass.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from tests.whole_run.matrix.relay import Damage, relay

DROP = ("-j", "DROP")
RESET = ("--tcp-flags", "RST", "NONE", "-j", "REJECT", "--reject-with", "tcp-reset")
"""Answers every packet with a reset, which itself passes."""


def run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


@contextmanager
def rule(chain: str, *words: str, table: str = "filter", first: bool = False) -> Iterator[None]:
    where = ("iptables", "--wait", "--table", table)
    run(*where, "--insert" if first else "--append", chain, *words)
    try:
        yield
    finally:
        run(*where, "--delete", chain, *words)


@dataclass(frozen=True)
class Link:
    """Args: address: of the server, as this client alone uses it; port: of the server"""

    address: str
    port: int

    @contextmanager
    def translated(self) -> Iterator[None]:
        """The address leads to 127.0.0.1."""
        with rule("OUTPUT", *self._to_server, "-j", "DNAT", "--to", "127.0.0.1", table="nat"):
            yield

    @property
    def _to_server(self) -> tuple[str, ...]:
        return ("-d", self.address, "-p", "tcp", "--dport", str(self.port))

    def connections(self) -> list[int]:
        """The client's ports of the established connections."""
        found = run("ss", "-Htn", "state", "established", "dst", f"{self.address}:{self.port}")
        return [int(line.split()[2].rpartition(":")[2]) for line in found.splitlines()]

    @contextmanager
    def open_ones(self, *target: str) -> Iterator[int]:
        """Every packet of the connections that are open now meets DROP or RESET; new connections
        work. Yields their number."""
        ports = self.connections()
        with ExitStack() as stack:
            for port in ports:
                for side in ("--sport", "--dport"):
                    words = ("-p", "tcp", side, str(port), *target)
                    stack.enter_context(rule("INPUT", *words))
            yield len(ports)

    @contextmanager
    def all_packets(self, *words: str) -> Iterator[None]:
        """All packets of both directions meet this match and target."""
        with rule("INPUT", "-m", "conntrack", "--ctorigdst", self.address, *words):
            yield

    @contextmanager
    def through(self, damage: Damage) -> Iterator[None]:
        """New connections pass a relay; those that are open now are reset."""
        with relay(self.port, damage) as port, ExitStack() as stack:
            target = ("-j", "DNAT", "--to", f"127.0.0.1:{port}")
            stack.enter_context(rule("OUTPUT", *self._to_server, *target, table="nat", first=True))
            stack.enter_context(self.open_ones(*RESET))
            yield
