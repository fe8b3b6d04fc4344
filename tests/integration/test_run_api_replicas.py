"""Two run-api processes on one Redis behave as one, under load."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest

from tests.fixtures.run_api import start_run_api
from tests.integration.run_api_calls import (
    next_batch,
    register,
    submit,
)
from tests.support.wait import wait_for


@pytest.mark.parametrize("ending", ["client leaves", "server is killed"])
def test_an_answer_that_was_cut_off_is_given_again_and_no_sooner(
    http: httpx.Client, redis_url: str, tmp_path: Path, ending: str
) -> None:
    register(http)
    submit(http, 0, 1, images="more than sockets hold" * 150_000)
    submit(http, 2, 3)
    replica = start_run_api(redis_url, tmp_path)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((httpx.URL(replica.url).host, httpx.URL(replica.url).port))
        client.sendall(b"GET /batch HTTP/1.1\r\nHost: run-api\r\n\r\n")
        assert client.recv(4) == b"HTTP"
        assert [next_batch(http) for _ in range(2)] == [[2, 3], None]
        if ending == "client leaves":
            client.close()
        else:
            replica.process.kill()
        assert wait_for(lambda: next_batch(http)) == [0, 1]
    replica.process.stop()
