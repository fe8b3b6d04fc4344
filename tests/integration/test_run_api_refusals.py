"""run-api counts refused groups and names the last reason to the trainer that waits for a batch."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from grpo_api.store.redis import layout_prefix
from grpo_core.clients.run_api import TrainerClient
from grpo_core.errors import ServiceUnavailable
from grpo_core.wire.run_api import EnvironmentCount, Registration
from tests.fixtures.run_api import MAX_BODY_BYTES, RUN_ID
from tests.integration.run_api_calls import REGISTRATION, ApiClient, group
from tests.integration.run_store_rig import open_run

INVALID = group(1, scores=[0.0])
UNSERVABLE = group(1, size=3)


def refusals(http: ApiClient, trainer: int) -> tuple[int, str]:
    """The number and the last reason, as a waiting trainer gets them; /status shows the same."""
    count = http.lease(trainer).raise_for_status().json()["environments"]
    told = count["refused_groups"], count["last_refusal"]
    shown = http.get("/status").json()
    assert (shown["refused_groups"], shown["last_refusal"]) == told
    return told


@pytest.fixture
def trainer(http: ApiClient) -> int:
    http.start()
    uuid: int = http.register().json()["uuid"]
    return uuid


@pytest.mark.parametrize(
    ("path", "content", "headers", "status", "groups", "reason"),
    [
        ("/scored_data", INVALID, {}, 422, 1, "scores: 1 entries for 2 sequences"),
        ("/scored_data", {}, {}, 422, 1, "tokens: Field required (and 2 more)"),
        ("/scored_data", UNSERVABLE, {}, 422, 1, "groups of 3 sequences do not"),
        ("/scored_data", group(1, size=4, env_id=0), {}, 422, 1, "env_id 0: this group has 4"),
        ("/scored_data", group(1), {"Idempotency-Key": "two words"}, 422, 1, "idempotency-key: "),
        ("/scored_data", b"no gzip", {"Content-Encoding": "gzip"}, 400, 1, "the body is not valid"),
        ("/scored_data", b" " * (MAX_BODY_BYTES + 1), {}, 413, 1, "the body is larger than"),
        ("/scored_data_list", [group(1), INVALID], {}, 422, 1, "1: scores: 1 entries for"),
        ("/scored_data_list", [group(1), UNSERVABLE], {}, 422, 2, "groups of 3 seq"),
        ("/scored_data_list", [group(1)], {"Idempotency-Key": ""}, 422, 1, "idempotency-key: "),
    ],
)
def test_every_way_of_refusing_counts_and_is_named(
    http: ApiClient,
    trainer: int,
    path: str,
    content: Any,
    headers: dict[str, str],
    status: int,
    groups: int,
    reason: str,
) -> None:
    http.register_environment()
    body = {"content": content} if isinstance(content, bytes) else {"json": content}
    for again in (1, 2):
        assert http.post(path, headers=headers, **body).status_code == status
        number, last = refusals(http, trainer)
        assert number == groups * again
        assert reason in last
    http.submit(2)
    assert refusals(http, trainer)[0] == groups * 2


def test_a_repeat_of_a_refusal_counts_once_for_each_trainer(http: ApiClient, trainer: int) -> None:
    def repeat(body: Any = INVALID) -> None:
        for _ in range(2):
            answer = http.post("/scored_data", json=body, headers={"Idempotency-Key": "key"})
            assert answer.status_code == 422

    repeat()
    assert refusals(http, trainer)[0] == 1
    repeat(UNSERVABLE)
    assert refusals(http, trainer)[0] == 2
    newer = http.register().json()["uuid"]
    assert refusals(http, newer) == (0, "")
    repeat()
    assert refusals(http, newer)[0] == 1
    http.get("/reset_data").raise_for_status()
    assert http.get("/status").json()["refused_groups"] == 0


def test_before_a_trainer_nothing_is_counted(http: ApiClient, redis_url: str) -> None:
    assert http.post("/scored_data", json=group(1)).status_code == 409
    http.send_raw(INVALID)
    with redis.Redis.from_url(redis_url) as connection:
        assert not connection.exists(f"{layout_prefix(RUN_ID)}refusals")


def test_a_trainer_without_a_batch_ends_with_the_last_reason(http: ApiClient) -> None:
    with TrainerClient(str(http.base_url)) as trainer:
        trainer.register(Registration.model_validate(REGISTRATION))
        with pytest.raises(ServiceUnavailable, match=r"send groups$"):
            trainer.next_batch(0.01)
        for _ in range(3):
            http.send_raw({})
        seen: list[EnvironmentCount] = []
        with pytest.raises(
            ServiceUnavailable,
            match=r"since this trainer registered: 3; the last reason: tokens: Field required "
            r"\(and 2 more\); correct the environment",
        ):
            trainer.next_batch(0.01, look=seen.append)
    assert seen[-1].refused_groups == 3


async def test_a_command_that_is_sent_twice_counts_once(
    redis_url: str,
) -> None:
    async with open_run(redis_url, "refusals") as run:
        run.link.repeats_scripts = True
        await run.store.count_refusal("no", groups=3)
        run.link.loses_answer_of = "count_refusal"
        await run.store.count_refusal("no answer")  # is only logged
        stats = await run.store.stats()
        assert (stats.refused_groups, stats.last_refusal) == (4, "no answer")
