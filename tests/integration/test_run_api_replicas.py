"""Two run-api processes on one Redis behave as one, under load."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.fixtures.run_api import start_run_api
from tests.integration.run_api_calls import (
    group,
    next_batch,
    register,
    submit,
)
from tests.support.wait import DEADLINE_S, wait_for

ENVIRONMENTS = 6
GROUP_SIZE = 4
BATCH_SIZE = 16
GROUPS_EACH = 30


@pytest.fixture
def clients(http: httpx.Client, redis_url: str, tmp_path: Path) -> Iterator[list[httpx.Client]]:
    """Clients of the session's run-api and of a second process with the same run."""
    replica = start_run_api(redis_url, tmp_path)
    with httpx.Client(base_url=replica.url, timeout=DEADLINE_S) as client:
        yield [http, client]
    replica.process.stop()


def test_pollers_without_leases_are_handed_each_group_once(clients: list[httpx.Client]) -> None:
    register(clients[0])
    sent = range(200)
    body = [group(marker) for marker in sent]
    clients[0].post("/scored_data_list", json=body).raise_for_status()

    def poll(client: httpx.Client) -> list[int]:
        taken: list[int] = []
        while batch := next_batch(client):
            taken += batch
        return taken

    with ThreadPoolExecutor(6) as pool:
        handed_out = [marker for taken in pool.map(poll, clients * 3) for marker in taken]
    assert sorted(handed_out) == list(sent)


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
