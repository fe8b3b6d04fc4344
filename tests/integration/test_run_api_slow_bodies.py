"""Bodies that never end, and more bodies than the memory limit allows."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from tests.fixtures.run_api import RunningApi
from tests.integration.conftest import StartApi
from tests.integration.run_api_calls import ApiClient, group
from tests.support.wait import DEADLINE_S, wait_for

BODY_DEADLINE_S = 2.0
"""Long enough for the sent bytes to arrive, even on a busy machine."""
MAX_BODY_BYTES = 2 * 1024 * 1024
LARGE = json.dumps(group(9)).encode() + b" " * (MAX_BODY_BYTES - 4096)


@pytest.fixture(scope="module")
def impatient(own_api: StartApi) -> RunningApi:
    return own_api("slow", further={"--body-deadline-s": BODY_DEADLINE_S})


def connection(api: RunningApi) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(api.url.rpartition(":")[2])), DEADLINE_S)


def begin(peer: socket.socket, path: str, length: int, sent: int) -> None:
    """Start a body of `length` bytes, and send `sent` of them."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
    peer.sendall(head.encode() + b" " * sent)


def until_closed(peer: socket.socket) -> bytes:
    received = b""
    with suppress(ConnectionResetError):  # if some of the sent bytes are still unread
        while chunk := peer.recv(65536):
            received += chunk
    return received


STOPPED = [("/scored_data", 0), ("/scored_data_list", 200_000), ("/register", 200_000)]


def test_a_body_that_stops_is_408_and_the_connection_closed(impatient: RunningApi) -> None:
    with ExitStack() as opened:
        began = time.monotonic()
        peers = [opened.enter_context(connection(impatient)) for _ in STOPPED]
        for peer, (path, sent) in zip(peers, STOPPED, strict=True):
            begin(peer, path, 300_000, sent)
        answers = [until_closed(peers[0])]
        assert time.monotonic() - began >= BODY_DEADLINE_S
        answers += [until_closed(peer) for peer in peers[1:]]
    for answer, (path, sent) in zip(answers, STOPPED, strict=True):
        assert answer.startswith(b"HTTP/1.1 408 "), path
        assert b"connection: close\r\n" in answer
        arrived = re.search(rb"(\d+) bytes of the body arrived within 2 s", answer)
        assert arrived is not None
        # a suspended server has not read all of them
        assert min(sent, 1) <= int(arrived[1]) <= sent


def test_a_body_that_trickles_is_408_all_the_same(impatient: RunningApi) -> None:
    with connection(impatient) as peer:
        begin(peer, "/scored_data", 100_000, 0)
        peer.setblocking(False)

        def answered_to_another_byte() -> bytes:
            with suppress(ConnectionError):  # already closed after the answer
                peer.send(b" ")
            with suppress(BlockingIOError):
                return peer.recv(65536)
            return b""

        assert wait_for(answered_to_another_byte).startswith(b"HTTP/1.1 408 ")


def post(http: ApiClient, body: bytes | Iterator[bytes]) -> int:
    answer = http.post("/scored_data", content=body)
    assert ("Retry-After" in answer.headers) == (answer.status_code == 503)
    return answer.status_code


def chunked(body: bytes) -> Iterator[bytes]:
    """A body without Content-Length."""
    for at in range(0, len(body), 65536):
        yield body[at : at + 65536]


def test_what_bodies_hold_has_a_limit_that_leaves_room_for_small_ones(own_api: StartApi) -> None:
    api = own_api("held", further={"--max-body-bytes": MAX_BODY_BYTES})
    with ApiClient(base_url=api.url, timeout=DEADLINE_S) as http:
        http.start()
        with ExitStack() as stalled:

            def is_full_once_more_have_come() -> bool:
                if {post(http, LARGE), post(http, chunked(LARGE))} == {503}:
                    return True
                peer = stalled.enter_context(connection(api))
                begin(peer, "/scored_data", MAX_BODY_BYTES, MAX_BODY_BYTES - 1)
                return False

            wait_for(is_full_once_more_have_come)
            before = http.status()
            assert post(http, json.dumps(group(1)).encode()) == 200
            assert http.status() == (before[0], before[1] + 1)
        wait_for(lambda: post(http, LARGE) == 200)
