"""A trainer whose connection to run-api breaks trains on every group once, and on none twice."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest

from grpo_core.errors import AnswerLost, ProtocolViolation, ServiceUnavailable
from grpo_core.run_api_client import TrainerClient
from grpo_core.wire import Registration, ScoredGroup
from tests.integration.cutting_proxy import Cut, CuttingProxy, cutting_proxy
from tests.integration.run_api_calls import REGISTRATION, status, submit

DEADLINE_S = 5.0


@pytest.fixture
def http(clean_run_api: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=clean_run_api) as client:
        yield client


@pytest.fixture
def proxy(clean_run_api: str) -> Iterator[CuttingProxy]:
    with cutting_proxy(clean_run_api) as proxy:
        yield proxy


@pytest.fixture
def trainer(proxy: CuttingProxy) -> Iterator[TrainerClient]:
    with TrainerClient(proxy.url, deadline_s=DEADLINE_S) as client:
        client.register(Registration.model_validate(REGISTRATION))
        yield client


def markers(groups: list[ScoredGroup]) -> list[int]:
    return [group.tokens[0][0] for group in groups]


@pytest.mark.parametrize("cut", [Cut.REQUEST, Cut.ANSWER, Cut.GATEWAY])
def test_a_batch_whose_answer_is_lost_comes_again(
    http: httpx.Client, proxy: CuttingProxy, trainer: TrainerClient, cut: Cut
) -> None:
    submit(http, 1, 2, 3, 4)
    proxy.next_cut = cut
    assert markers(trainer.next_batch(DEADLINE_S)) == [1, 2]
    assert markers(trainer.next_batch(DEADLINE_S)) == [3, 4]
    assert status(http) == (2, 0)


@pytest.mark.parametrize("cut", [Cut.REQUEST, Cut.ANSWER, Cut.GATEWAY])
def test_a_batch_that_was_received_is_not_trained_on_twice(
    http: httpx.Client, proxy: CuttingProxy, trainer: TrainerClient, cut: Cut
) -> None:
    """A request that is lost on its way leaves the batch before unacknowledged at run-api."""
    submit(http, 1, 2, 3, 4)
    assert markers(trainer.next_batch(DEADLINE_S)) == [1, 2]
    proxy.next_cut = cut
    assert markers(trainer.next_batch(DEADLINE_S)) == [3, 4]
    assert status(http) == (2, 0)


def test_a_lost_answer_without_a_batch_changes_nothing(
    http: httpx.Client, proxy: CuttingProxy, trainer: TrainerClient
) -> None:
    submit(http, 1, 2)
    assert markers(trainer.next_batch(DEADLINE_S)) == [1, 2]
    proxy.next_cut = Cut.ANSWER
    with pytest.raises(ServiceUnavailable, match="no batch within"):
        trainer.next_batch(0.2)
    submit(http, 3, 4)
    assert markers(trainer.next_batch(DEADLINE_S)) == [3, 4]


def test_before_registration_nothing_can_be_asked_again(
    proxy: CuttingProxy,
) -> None:
    with TrainerClient(proxy.url, deadline_s=DEADLINE_S) as client:
        proxy.next_cut = Cut.ANSWER
        with pytest.raises(AnswerLost, match="may have been carried out"):
            client.next_batch(DEADLINE_S)


def test_a_run_that_was_reset_says_so(http: httpx.Client, trainer: TrainerClient) -> None:
    http.get("/reset_data").raise_for_status()
    with pytest.raises(ProtocolViolation, match="somebody called /reset_data, or its Redis lost"):
        trainer.next_batch(DEADLINE_S)


def test_what_waits_is_done_between_the_polls(http: httpx.Client, trainer: TrainerClient) -> None:
    asked = []

    def send_the_data() -> None:
        asked.append(True)
        submit(http, 1, 2)

    assert markers(trainer.next_batch(DEADLINE_S, meanwhile=send_the_data)) == [1, 2]
    assert asked == [True]


def test_what_is_done_between_the_polls_does_not_count_as_waiting(
    http: httpx.Client, trainer: TrainerClient
) -> None:
    """As long as a server is waited for, no environment can send."""
    polls = iter([lambda: time.sleep(0.6), lambda: submit(http, 1, 2)])
    assert markers(trainer.next_batch(0.4, meanwhile=lambda: next(polls)())) == [1, 2]


def test_run_api_that_is_gone_is_named() -> None:
    with (
        TrainerClient("http://127.0.0.1:1", deadline_s=0.3) as nobody,
        pytest.raises(
            ServiceUnavailable, match=r"Atropos API not reachable at http://127\.0\.0\.1:1"
        ),
    ):
        nobody.next_batch(DEADLINE_S)
