"""Client connections that outlive the engine process.

While a server drains, it takes in nothing new and closes no connection under a client's hands: a
client that sends its next request at that very moment would lose it. A connection that waits for a
request is *parked*: its descriptor goes to the supervisor, and with it whatever the client sends
meanwhile, which lies unread in the kernel. The next engine process goes on reading there. A
connection whose answer has not begun gets `Connection: close` with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

FLUSH_POLL_S = 0.01

Park = Callable[[int], None]
"""Takes a descriptor of an open connection; it is closed here afterwards."""


class Handover:
    """Shared by all connections of a server. Inactive until `begin`."""

    def __init__(self) -> None:
        self._park: Park | None = None

    @property
    def begun(self) -> bool:
        return self._park is not None

    def begin(self, park: Park) -> None:
        """From now on connections that wait for a request are parked."""
        self._park = park

    def take(self, transport: Any) -> None:
        """Park the connection of an asyncio transport, which ends here."""
        assert self._park is not None, "begin() comes first"
        descriptor = os.dup(transport.get_extra_info("socket").fileno())
        try:
            # Nothing may be read between this and the hand-over: it would be lost.
            transport.abort()  # closes our descriptor only; the connection stays
            self._park(descriptor)
        finally:
            os.close(descriptor)


def handover_protocol(handover: Handover) -> type[HttpToolsProtocol]:
    """A protocol for `uvicorn.Config(http=...)` whose connections take part in `handover`."""

    class HandoverProtocol(HttpToolsProtocol):
        in_request = False
        """Some bytes of a request have been read, but not all."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if handover.begun:  # it was taken from the queue in the moment that accepting ended
                self.shutdown()

        def on_message_begin(self) -> None:
            self.in_request = True
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            super().on_headers_complete()
            if handover.begun and self.cycle is not None:
                self.cycle.keep_alive = False

        def on_message_complete(self) -> None:
            self.in_request = False
            super().on_message_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if handover.begun and not self.transport.is_closing():
                self.shutdown()

        def shutdown(self) -> None:
            """Called once by the server when it stops accepting."""
            if not handover.begun:
                super().shutdown()
            elif self._waits_for_a_request():
                self._park_once_flushed()
            elif self.cycle is not None and not self.cycle.response_started:
                self.cycle.keep_alive = False
            # Else its answer says "keep-alive" already: it is parked when that is complete.

        def _park_once_flushed(self) -> None:
            if self.transport.is_closing() or self.in_request:
                return
            if self.transport.get_write_buffer_size():
                self.loop.call_later(FLUSH_POLL_S, self._park_once_flushed)
                return
            self._unset_keepalive_if_required()
            handover.take(self.transport)

        def _waits_for_a_request(self) -> bool:
            answered = self.cycle is None or self.cycle.response_complete
            return answered and not self.in_request

    return HandoverProtocol
