"""A whole environment fed by scripted servers, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_env.prompts import PromptEncoder
from grpo_env.settings import EnvServerSettings, load_env_settings
from grpo_env.tasks import Message, Task
from grpo_env.tasks.arithmetic import Sum
from grpo_env.worker import serve
from tests.unit.env.canned import PROMPT, generate_answer, inference_routes
from tests.unit.env.http_stub import Answer, Route, StubServer, stub_server
from tests.unit.env.scripted_run_api import RunApi

DEADLINE_S = 120.0


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


def settings(run_api: StubServer, inference: StubServer, *more: str) -> EnvServerSettings:
    options = {
        "--openai.model-name": "m",
        "--openai.base-url": inference.url + "/v1",
        "--openai.request-deadline-s": "60",
        "--env.rollout-server-url": run_api.url,
        "--env.run-api-deadline-s": "60",
        "--env.group-size": "2",
    }
    options |= dict(option.split("=") for option in more)
    return load_env_settings(
        ["arithmetic", "serve", *(f"{name}={value}" for name, value in options.items())]
    )


async def run(api: RunApi, generate: Route, *more: str) -> None:
    """Serve one-line sums until the run is complete."""
    await feed(api.routes(), inference_routes(generate), *more)


async def feed(
    api_routes: dict[str, Route],
    engine_routes: dict[str, Route],
    *more: str,
    task: Task | None = None,
    prompts: PromptEncoder | None = None,
) -> Seen:
    with stub_server(api_routes) as run_api, stub_server(engine_routes) as inference:
        async with asyncio.timeout(DEADLINE_S):
            chosen = settings(run_api, inference, *more)
            await serve(chosen, task or Sevens(), prompts or Prompts())
    return Seen(run_api, inference)
