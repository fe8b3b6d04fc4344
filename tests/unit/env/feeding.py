"""A whole environment fed by scripted servers, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from grpo_env import worker
from grpo_env.prompts import PromptEncoder
from grpo_env.settings import load_env_settings
from grpo_env.tasks import Message, Task
from grpo_env.tasks.arithmetic import Sum
from tests.support.wait import DEADLINE_S
from tests.unit.env.canned import PROMPT, generate_answer, inference_routes
from tests.unit.env.http_stub import Answer, Route, StubServer, stub_server
from tests.unit.env.scripted_run_api import RunApi


class Prompts:
    def encode(self, _messages: Sequence[Message]) -> list[int]:
        return PROMPT


class Sevens:
    """Always 3+4, so that canned answers have known scores."""

    name = "sevens"
    max_completion_tokens = 4

    def next_item(self) -> Sum:
        return Sum(3, 4)


@dataclass(frozen=True)
class Seen:
    """The servers, for what came in."""

    run_api: StubServer
    inference: StubServer


def right_and_wrong(_body: dict[str, Any]) -> Answer:
    return 200, generate_answer(["7", "8"])


async def run(api: RunApi, generate: Route, *options: str) -> None:
    """Serve one-line sums until the run is complete."""
    await feed(api.routes(), inference_routes(generate), *options)


async def feed(
    api_routes: dict[str, Route],
    engine_routes: dict[str, Route],
    *options: str,
    task: Task | None = None,
    prompts: PromptEncoder | None = None,
) -> Seen:
    with (
        stub_server(api_routes) as run_api,
        stub_server(engine_routes) as inference,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(worker, "_GOODBYE_S", DEADLINE_S)  # a slow machine hears it too
        settings = load_env_settings(
            [
                *("arithmetic", "serve", "--env.group-size=2", "--openai.model-name=m"),
                *("--openai.request-deadline-s=60", "--env.run-api-deadline-s=60"),
                f"--openai.base-url={inference.url}/v1",
                f"--env.rollout-server-url={run_api.url}",
                *options,
            ]
        )
        async with asyncio.timeout(DEADLINE_S):
            await worker.serve(settings, task or Sevens(), prompts or Prompts())
    return Seen(run_api, inference)
