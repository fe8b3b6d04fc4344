"""The producer of groups, with a scripted inference server and run-api."""

from __future__ import annotations

from typing import Any, cast

import pytest

from grpo_core.clients.run_api import EnvironmentClient
from grpo_core.wire.scored_group import ScoredGroup
from grpo_env.rollout.groups import FailureReason, GroupLost, SampledGroup
from grpo_env.rollout.producer import GroupCounts, GroupProducer
from grpo_env.settings import EnvServerSettings
from grpo_env.tasks.items import ItemStream
from tests.support.canned import generate_answer
from tests.unit.env.rollout.rig import PLAN, Rewarded, engine_on, item_of, sevens


class OneItem:
    def next(self) -> Any:
        return item_of(Rewarded(sevens))


class SentGroups:
    def __init__(self) -> None:
        self.seen: list[tuple[int | None, str]] = []

    async def submit(self, group: ScoredGroup, run_uuid: str) -> None:
        self.seen.append((group.env_id, run_uuid))


async def test_a_group_belongs_to_the_run_in_which_its_sampling_began() -> None:
    """run-api is reset, and the environment registers again, while the group is sampled."""
    api, settings = SentGroups(), EnvServerSettings(task="arithmetic", model="m")

    def generate(_body: dict[str, Any]) -> Any:
        producer.join(1, "new run")
        return 200, generate_answer(["7", "8"])

    async with engine_on(generate) as (engine, _):
        items, client = cast(ItemStream, OneItem()), cast(EnvironmentClient, api)
        producer = GroupProducer(settings, items, engine, client)
        producer.join(0, "old run")
        await producer.produce(PLAN)
        await producer.produce(PLAN)
    assert api.seen == [(0, "old run"), (1, "new run")]


def test_only_equal_scores_lower_the_share_of_kept_groups() -> None:
    counts = GroupCounts()
    assert counts.kept_share == 1
    for _ in range(3):
        counts.record(SampledGroup(lost=GroupLost(FailureReason.EQUAL_SCORES, "all 1")))
    assert counts.kept_share == pytest.approx(1 / 4)
    for _ in range(64):  # older groups are forgotten
        counts.record(SampledGroup(lost=GroupLost(FailureReason.UNAVAILABLE, "no server")))
    assert counts.kept_share == 1
