"""The stub that environments are tested with."""

from __future__ import annotations

import socket

import httpx

from tests.unit.env.http_stub import stub_server


def test_a_request_that_is_broken_off_is_none() -> None:
    with stub_server({"POST /x": lambda body: (200, body)}) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as leaving:
            leaving.sendall(b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
            leaving.shutdown(socket.SHUT_WR)
            assert leaving.recv(1) == b""  # closed without an answer
        assert httpx.post(f"{server.url}/x", json={"whole": 1}).json() == {"whole": 1}
    assert server.bodies("POST /x") == [{"whole": 1}]
