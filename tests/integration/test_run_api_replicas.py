"""Two run-api processes on one Redis behave as one, under load."""

from __future__ import annotations

import random
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import httpx
import pytest

from tests.fixtures.run_api import start_run_api
from tests.integration.run_api_calls import ApiClient, group
from tests.support.wait import DEADLINE_S, wait_for

ENVIRONMENTS = 6
GROUP_SIZE = 4
BATCH_SIZE = 16
GROUPS_EACH = 30


@pytest.fixture
def clients(http: ApiClient, redis_url: str, tmp_path: Path) -> Iterator[list[ApiClient]]:
    """Clients of the session's run-api and of a second process with the same run."""
    replica = start_run_api(redis_url, tmp_path)
    with ApiClient(base_url=replica.url, timeout=DEADLINE_S) as client:
        yield [http, client]
    replica.process.stop()


def test_pollers_without_leases_are_handed_each_group_once(clients: list[ApiClient]) -> None:
    clients[0].register()
    sent = range(200)
    body = [group(marker) for marker in sent]
    clients[0].post("/scored_data_list", json=body).raise_for_status()

    def poll(client: ApiClient) -> list[int]:
        taken: list[int] = []
        while batch := client.next_batch():
            taken += batch
        return taken

    with ThreadPoolExecutor(6) as pool:
        handed_out = [marker for taken in pool.map(poll, clients * 3) for marker in taken]
    assert sorted(handed_out) == list(sent)


@pytest.mark.parametrize("ending", ["client leaves", "server is killed"])
def test_an_answer_that_was_cut_off_is_given_again_and_no_sooner(
    http: ApiClient, redis_url: str, tmp_path: Path, ending: str
) -> None:
    http.register()
    http.submit(0, 1, images="more than sockets hold" * 150_000)
    http.submit(2, 3)
    replica = start_run_api(redis_url, tmp_path)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((httpx.URL(replica.url).host, httpx.URL(replica.url).port))
        client.sendall(b"GET /batch HTTP/1.1\r\nHost: run-api\r\n\r\n")
        assert client.recv(4) == b"HTTP"
        assert [http.next_batch() for _ in range(2)] == [[2, 3], None]
        if ending == "client leaves":
            client.close()
        else:
            replica.process.kill()
        assert wait_for(lambda: http.next_batch()) == [0, 1]
    replica.process.stop()


class Sender:
    """An environment that sends whole groups, parts and lists, each to a random replica.

    It sometimes repeats a submission with the same key.
    """

    def __init__(self, env_id: int, clients: list[ApiClient]) -> None:
        self._env_id = env_id
        self._clients = clients
        self._random = random.Random(env_id)
        self._markers = count(env_id * 10_000)
        self.sent: list[int] = []

    def run(self) -> None:
        for number in range(GROUPS_EACH):
            kind = self._random.random()
            if kind < 0.6:
                self._send("/scored_data", self._group(GROUP_SIZE), number)
            elif kind < 0.8:
                self._send("/scored_data_list", [self._group(GROUP_SIZE) for _ in range(2)], number)
            else:
                for size in (1, GROUP_SIZE - 1):
                    self._send("/scored_data", self._group(size), f"{number}-{size}")

    def _group(self, size: int) -> dict[str, object]:
        marker = next(self._markers)
        self.sent.append(marker)
        return group(marker, size=size, env_id=self._env_id)

    def _send(self, path: str, body: object, name: object) -> None:
        headers = {"Idempotency-Key": f"{self._env_id}/{name}"}
        for _ in range(self._random.choice([1, 1, 2])):
            client = self._random.choice(self._clients)
            client.post(path, json=body, headers=headers).raise_for_status()


def test_every_group_is_handed_out_once(clients: list[ApiClient]) -> None:
    trainer = clients[0].register(batch_size=BATCH_SIZE).json()["uuid"]
    clients[1].get("/batch", params={"trainer": trainer})
    env_ids = [
        clients[i % 2].register_environment(group_size=GROUP_SIZE)["env_id"]
        for i in range(ENVIRONMENTS)
    ]
    assert env_ids == list(range(ENVIRONMENTS))
    senders = [Sender(env_id, clients) for env_id in env_ids]
    with ThreadPoolExecutor(ENVIRONMENTS) as pool:
        sending = [pool.submit(sender.run) for sender in senders]
        trained = _train(clients, trainer, until=lambda: all(done.done() for done in sending))
        for done in sending:
            done.result()
    sent = Counter(marker for sender in senders for marker in sender.sent)
    left = clients[0].status()[1]
    assert set(sent.values()) == {1}
    assert not trained - sent
    assert sum(trained.values()) == len(trained) == len(sent) - left
    assert left < BATCH_SIZE


def _train(clients: list[ApiClient], trainer: int, until: Callable[[], bool]) -> Counter[int]:
    """Lease and acknowledge at random replicas, and lease some batches twice.

    Returns:
        How often each group was handed out, without repeats of a batch.
    """
    rng = random.Random(0)
    trained: Counter[int] = Counter()
    after = 0
    while True:
        was_done = until()
        asked = {"trainer": trainer, "after": after, "wait_s": 0.0 if was_done else 0.5}
        answer = rng.choice(clients).get("/batch", params=asked).raise_for_status()
        found = answer.json()
        if found["batch"] is None:
            if was_done:
                return trained
            continue
        if rng.random() < 0.2:
            assert rng.choice(clients).get("/batch", params=asked).content == answer.content
        after = found["batch_id"]
        assert sum(len(item["tokens"]) for item in found["batch"]) == BATCH_SIZE
        trained.update(item["tokens"][0][0] for item in found["batch"])
        if rng.random() < 0.3:
            acked = rng.choice(clients).post(f"/batch/{after}/ack", params={"trainer": trainer})
            acked.raise_for_status()
