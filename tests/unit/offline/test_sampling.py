"""Groups that are lost are replaced, stale rollouts are refused, and batches hold each sequence."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.scored_group import ScoredGroup
from grpo_env.rollout.groups import FailureReason, GroupLost, SampledGroup, SamplingPlan
from grpo_env.tasks import Task, TaskOptions
from grpo_env.tasks.items import Item, ItemStream
from grpo_offline.batches import optimizer_batches
from grpo_offline.errors import KeysInvalid, RolloutsFail, StaleServer
from grpo_offline.sampling import Sampler, require_fresh
from grpo_trainer.data.batch_advantages import group_advantages
from grpo_trainer.data.groups import GroupLimits, usable_group
from grpo_trainer.objectives import Objective

PLAN = SamplingPlan(2, 1.0, 64, 4, drop_equal_scores=False)
TASK = Task(TaskOptions())
START = PolicyVersion(1, 0)
LIMITS = GroupLimits(vocab_size=100, seq_len=64)


def group(scores: Sequence[float], version: PolicyVersion = START) -> ScoredGroup:
    count = len(scores)
    return ScoredGroup(
        tokens=[[1, 2, 3]] * count,
        masks=[[-100, 2, 3]] * count,
        inference_logprobs=[[1.0, -0.5, -0.5]] * count,
        scores=[*scores],
        group_overrides={"policy_version": [[[*version], [*version]]] * count},
    )


class Engine:
    """Fails for the items whose prompts it is given."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.asked: list[str] = []

    async def roll_out(self, item: Item, _plan: SamplingPlan) -> SampledGroup:
        self.asked.append(str(item.prompt))
        if item.prompt in self.failing:
            return SampledGroup(lost=GroupLost(FailureReason.REFUSED, f"no {item.prompt}"))
        return SampledGroup(group=group([0.0, 1.0]))


def items(*prompts: str) -> list[Item]:
    return [Item(TASK, {}, prompt) for prompt in prompts]


def stream(*prompts: str) -> ItemStream:
    return ItemStream([(items(*prompts), 1.0)], seed=0)


async def test_a_lost_group_is_replaced_by_one_of_a_spare_item() -> None:
    engine = Engine("bad")
    sampler = Sampler(engine, PLAN, 2, has_logprobs=True)  # type: ignore[arg-type]
    sampled = await sampler.groups(items("good", "bad", "fine"), stream("spare"))
    assert len(sampled.groups) == 3
    assert [one.detail for one in sampled.lost] == ["no bad"]
    assert engine.asked == ["good", "bad", "fine", "spare"]


async def test_an_iteration_gives_up_when_two_of_three_groups_are_lost() -> None:
    sampler = Sampler(Engine("bad"), PLAN, 2, has_logprobs=True)  # type: ignore[arg-type]
    with pytest.raises(RolloutsFail, match="no bad"):
        await sampler.groups(items("bad", "bad"), stream("bad"))


async def test_logprobs_that_are_placeholders_do_not_reach_the_trainer() -> None:
    sampler = Sampler(Engine(), PLAN, 2, has_logprobs=False)  # type: ignore[arg-type]
    sampled = await sampler.groups(items("good"), stream("spare"))
    assert sampled.groups[0].inference_logprobs is None


def test_rollouts_of_other_weights_are_refused() -> None:
    groups = [group([0, 1]), group([0, 1], PolicyVersion(1, 1))]
    require_fresh(groups[:1], {PolicyVersion(1, 0)})
    with pytest.raises(StaleServer, match=r"version \(1, 1\), but the trainer holds .*\(1, 0\)"):
        require_fresh(groups, {PolicyVersion(1, 0)})


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 12])
def test_batches_hold_every_sequence_once_with_the_advantage_of_its_whole_group(steps: int) -> None:
    groups = [group([0, 1, 2, 4]), group([1, 0, 0, 0]), group([3, 1, 2, 2])]
    objective = Objective()
    batches = optimizer_batches(groups, steps, objective, LIMITS)
    sizes = [sum(part.size for part in batch) for batch in batches]
    assert max(sizes) - min(sizes) <= 1
    assert sum(sizes) == 12
    parts = [part for batch in batches for part in batch]
    assert [s for part in parts for s in part.scores] == [s for one in groups for s in one.scores]
    whole = group_advantages([usable_group(0, one, LIMITS) for one in groups], objective)
    expected = [value for advantages in whole for value in advantages.tolist()]
    assert [value for part in parts for value in advantages_of(part, objective)] == expected


def advantages_of(part: ScoredGroup, objective: Objective) -> list[float]:
    if part.advantages:
        return [row[0] for row in part.advantages]
    (computed,) = group_advantages([usable_group(0, part, LIMITS)], objective)
    found: list[float] = computed.tolist()
    return found


@pytest.mark.parametrize(
    "objective",
    [
        Objective(advantage="maxent"),
        Objective(advantage="batch_std"),
        Objective(kl_coef=0.1, kl_in="reward"),
    ],
)
def test_some_objectives_need_whole_groups(objective: Objective) -> None:
    assert len(optimizer_batches([group([0, 1]), group([1, 0])], 2, objective, LIMITS)) == 2
    with pytest.raises(KeysInvalid, match="whole groups"):
        optimizer_batches([group([0, 1, 2]), group([1, 0, 0])], 4, objective, LIMITS)
