"""A rollout engine on a scripted inference server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from grpo_core.wire.scored_group import ScoredGroup
from grpo_env.inference.pool import InferencePool
from grpo_env.rollout.chat_template import ChatTemplate
from grpo_env.rollout.engine import RolloutEngine
from grpo_env.rollout.grader import Grader
from grpo_env.rollout.groups import GroupLost, SampledGroup, SamplingPlan
from grpo_env.rollout.task_code import TaskCode
from grpo_env.rollout.teacher import Teacher
from grpo_env.tasks import Task
from grpo_env.tasks.items import Item, all_items
from tests.support.canned import inference_routes
from tests.support.http_stub import Route, StubServer, stub_server
from tests.support.wait import DEADLINE_S
from tests.unit.env.feeding import CannedTemplate, Rewarded, sevens

PLAN = SamplingPlan(
    group_size=2,
    temperature=0.7,
    max_token_length=100,
    max_completion_tokens=16,
    drop_equal_scores=True,
)


def item_of(task: Task) -> Item:
    return all_items(task)[0]


@asynccontextmanager
async def engine_on(
    generate: Route,
    template: ChatTemplate | None = None,
    weights: Mapping[str, float] | None = None,
    deadline_s: float = DEADLINE_S,
    teacher: Teacher | None = None,
) -> AsyncIterator[tuple[RolloutEngine, StubServer]]:
    with stub_server(inference_routes(generate)) as server:
        async with InferencePool([server.url + "/v1"], DEADLINE_S, 8) as pool:
            with TaskCode(deadline_s) as code:
                grader = Grader(weights or {}, code)
                shown = template or CannedTemplate()
                yield RolloutEngine(pool.generate, shown, grader, teacher), server


async def sample(
    generate: Route, task: Task | None = None, plan: SamplingPlan = PLAN, **how: Any
) -> tuple[SampledGroup, StubServer]:
    async with engine_on(generate, **how) as (engine, server):
        return await engine.roll_out(item_of(task or Rewarded(sevens)), plan), server


def prompts(server: StubServer) -> list[list[int]]:
    """Token ids of the prompt of each request."""
    return [body["prompt"]["prompt_token_ids"] for body in server.bodies("POST /generate")]


def submitted(sampled: SampledGroup) -> ScoredGroup:
    """The group, if it is not lost."""
    assert sampled.lost is None
    assert sampled.group is not None
    return sampled.group


def lost(sampled: SampledGroup) -> GroupLost:
    assert sampled.lost is not None
    return sampled.lost
