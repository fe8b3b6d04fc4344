"""Opens the listening sockets, which stay open while one engine replaces another."""

from __future__ import annotations

import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from grpo_core.process.closing import ClosesOnExit
from grpo_vllm.http.server import BACKLOG
from grpo_vllm.settings import ServerSettings


@dataclass(frozen=True)
class Sockets(ClosesOnExit):
    """Listening sockets. `private_path`: the path of the unix socket to the engine."""

    public: socket.socket
    control: socket.socket | None
    health: socket.socket
    private: socket.socket
    private_path: Path

    @classmethod
    def open(cls, settings: ServerSettings) -> Self:
        """Raises `OSError` with the address that is in use."""
        assert settings.health_port is not None, "the settings compute a default"
        public = _listening(settings.host, settings.port)
        control = None
        if settings.control_port is not None:
            control = _listening(settings.control_host, settings.control_port)
        health = _listening(settings.control_host, settings.health_port)
        path = Path(tempfile.mkdtemp(prefix="grpo-engine-")) / "private.sock"
        private = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        private.bind(str(path))
        private.listen(BACKLOG)
        return cls(public, control, health, private, path)

    def close(self) -> None:
        for each in (self.public, self.control, self.health, self.private):
            if each is not None:
                each.close()
        self.private_path.unlink(missing_ok=True)
        self.private_path.parent.rmdir()


def _listening(host: str, port: int) -> socket.socket:
    is_v6 = ":" in host
    family = socket.AF_INET6 if is_v6 else socket.AF_INET
    try:
        # From here on the kernel queues new connections instead of refusing them.
        return socket.create_server(
            (host, port), family=family, backlog=BACKLOG, dualstack_ipv6=is_v6
        )
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
