"""After lost answers of run-api, every group is queued once and trained once."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

import httpx
import pytest

from grpo_core.clients.aiohttp_transport import AiohttpTransport
from grpo_core.clients.run_api import EnvironmentClient, LeasedBatch, TrainerClient
from grpo_core.errors import ProtocolViolation, ServiceUnavailable, TrainerSuperseded, UnknownBatch
from grpo_core.wire.run_api import EnvironmentRegistration, Registration
from grpo_core.wire.scored_group import ScoredGroup
from tests.integration.run_api_calls import ENVIRONMENT, REGISTRATION, ApiClient, group
from tests.support.batches import next_batch
from tests.support.wait import DEADLINE_S, wait_for


class Cut(Enum):
    """Which part of the next request is lost. Later requests pass."""

    NOTHING = "nothing"
    REQUEST = "request"
    """The connection closes before the service receives the request."""
    ANSWER = "answer"
    """The service carries out the request, but its answer is lost."""
    GATEWAY = "gateway"
    """As ANSWER, but a gateway answers 504 instead."""


class Network:
    """Between our clients and run-api."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.next_cut = Cut.NOTHING
        send, send_later = httpx.HTTPTransport.handle_request, AiohttpTransport.handle_async_request

        def sent(transport: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
            cut = self._begin(request)
            answer = send(transport, request)
            answer.read()
            return self._end(cut, request, answer)

        async def sent_later(transport: AiohttpTransport, request: httpx.Request) -> httpx.Response:
            cut = self._begin(request)
            answer = await send_later(transport, request)
            await answer.aread()
            return self._end(cut, request, answer)

        monkeypatch.setattr(httpx.HTTPTransport, "handle_request", sent)
        monkeypatch.setattr(AiohttpTransport, "handle_async_request", sent_later)

    def _begin(self, request: httpx.Request) -> Cut:
        cut, self.next_cut = self.next_cut, Cut.NOTHING
        if cut is Cut.REQUEST:
            raise httpx.RemoteProtocolError("server disconnected", request=request)
        return cut

    def _end(self, cut: Cut, request: httpx.Request, answer: httpx.Response) -> httpx.Response:
        if cut is Cut.ANSWER:
            raise httpx.ReadError("connection reset", request=request)
        return httpx.Response(504, request=request) if cut is Cut.GATEWAY else answer


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    return Network(monkeypatch)


@pytest.fixture
def trainer(http: ApiClient) -> Iterator[TrainerClient]:
    with registered(str(http.base_url)) as client:
        yield client


def registered(url: str) -> TrainerClient:
    client = TrainerClient(url, deadline_s=DEADLINE_S)
    client.register(Registration.model_validate(REGISTRATION))
    return client


def markers(batch: LeasedBatch) -> tuple[int, list[int]]:
    return batch.id, [group.tokens[0][0] for group in batch.groups]


@pytest.mark.parametrize("cut", [Cut.REQUEST, Cut.ANSWER, Cut.GATEWAY])
async def test_a_run_that_loses_an_answer_to_every_call_trains_each_group_exactly_once(
    http: ApiClient, network: Network, cut: Cut
) -> None:
    http.start()
    async with EnvironmentClient(str(http.base_url), DEADLINE_S) as environment:
        network.next_cut = cut
        answer = await environment.register(EnvironmentRegistration.model_validate(ENVIRONMENT))
        # a second environment would block batches with a minimum that no process fills
        assert [known["env_id"] for known in http.get("/environments").json()] == [0]
        assert answer is not None
        assert answer["env_id"] == 0
        for marker in (1, 2):
            network.next_cut = cut
            sent = await environment.submit(
                ScoredGroup.model_validate(group(marker)), answer["run_uuid"]
            )
            assert sent == {"status": "received"}
    http.submit(3, 4, 5, 6)
    assert http.status() == (0, 6)
    network.next_cut = cut
    with registered(str(http.base_url)) as trainer:
        for batch in ((1, [1, 2]), (2, [3, 4])):
            network.next_cut = cut
            assert markers(next_batch(trainer)) == batch
        network.next_cut = cut
        trainer.acknowledge(2)
        trainer.acknowledge(1)  # an older acknowledgement changes nothing
    with registered(str(http.base_url)) as other:
        assert markers(next_batch(other)) == (3, [5, 6])
    assert http.status() == (3, 0)


def test_a_trainer_that_registers_again_is_handed_what_it_had_not_acknowledged(
    http: ApiClient, trainer: TrainerClient
) -> None:
    http.submit(1, 2)
    before = next_batch(trainer)
    trainer.register(Registration.model_validate(REGISTRATION))
    assert next_batch(trainer) == before


@pytest.mark.parametrize("cut", [Cut.NOTHING, Cut.REQUEST, Cut.ANSWER])
def test_a_batch_requested_ahead_is_the_next_one(
    http: ApiClient, network: Network, trainer: TrainerClient, cut: Cut
) -> None:
    http.submit(1, 2, 3, 4)
    assert markers(next_batch(trainer)) == (1, [1, 2])
    network.next_cut = cut
    prepared: list[LeasedBatch] = []
    trainer.request_ahead(1, prepared.append)
    if cut is Cut.NOTHING:
        wait_for(lambda: http.status() == (2, 0))
    found = next_batch(trainer)
    assert markers(found) == (2, [3, 4])
    assert cut is not Cut.NOTHING or prepared == [found]


def test_a_trainer_that_another_one_followed_is_told_so(http: ApiClient) -> None:
    url = str(http.base_url)
    with registered(url) as first:
        http.submit(1, 2, 3, 4)
        next_batch(first)
        with registered(url) as second:
            for act in (lambda: next_batch(first), lambda: first.acknowledge(1)):
                with pytest.raises(TrainerSuperseded, match="stop one of the two trainers"):
                    act()
            assert markers(next_batch(second)) == (1, [1, 2])


async def test_equal_groups_are_two_groups(http: ApiClient, trainer: TrainerClient) -> None:
    same = ScoredGroup.model_validate(group(1))
    async with EnvironmentClient(str(http.base_url), DEADLINE_S) as environment:
        for _ in range(2):
            await environment.submit(same, run_uuid="")
    assert markers(next_batch(trainer)) == (1, [1, 1])


def test_an_unknown_batch_and_a_reset_run_are_named(
    http: ApiClient, trainer: TrainerClient
) -> None:
    trainer.resume_after(7)
    with pytest.raises(UnknownBatch, match="this run never handed out batch 7"):
        next_batch(trainer)
    http.get("/reset_data").raise_for_status()
    with pytest.raises(ProtocolViolation, match="someone called /reset_data, or Redis lost"):
        next_batch(trainer)


def test_run_api_that_is_gone_is_named() -> None:
    with (
        TrainerClient("http://127.0.0.1:1", deadline_s=0.3) as nobody,
        pytest.raises(
            ServiceUnavailable, match=r"Atropos API not reachable at http://127\.0\.0\.1:1"
        ),
    ):
        nobody.register(Registration.model_validate(REGISTRATION))
