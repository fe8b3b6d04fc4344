"""Links with a bandwidth and a latency: each host sends and receives one chunk after another."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass
class Host:
    """`sent`, `received`: bytes so far. `alive`: False once the host was lost."""

    name: str
    sent: int = 0
    received: int = 0
    alive: bool = True
    _free_to_send_at: float = field(default=0.0, repr=False)
    _free_to_receive_at: float = field(default=0.0, repr=False)


class HostLost(OSError):
    """One end of a transfer was lost while it was under way."""


@dataclass
class Network:
    """Args:
    bytes_per_s: of every host's link, in each direction
    latency_s: of one request

    `free`: transfers take no time, for what is not measured.
    """

    bytes_per_s: float
    latency_s: float
    free: bool = False

    async def transfer(self, source: Host, target: Host, count: int) -> None:
        """Returns when `count` bytes have arrived. Transfers from one host, and to one host, follow
        one another in the order of their requests.

        Raises:
            HostLost: one of the two was lost before the end.
        """
        if self.free:
            return
        now, seconds = asyncio.get_running_loop().time(), count / self.bytes_per_s
        begin = max(now + self.latency_s, source._free_to_send_at)
        source._free_to_send_at = begin + seconds
        end = max(begin, target._free_to_receive_at) + seconds
        target._free_to_receive_at = end
        await asyncio.sleep(end - now)
        if not (source.alive and target.alive):
            raise HostLost(f"{source.name if target.alive else target.name} was lost")
        source.sent += count
        target.received += count
