"""Runs a whole environment in this process, with scripted servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from grpo_env import worker
from grpo_env.assembly import TaskSet
from grpo_env.rollout.chat_template import ChatTemplate
from grpo_env.settings import load_env_settings
from grpo_env.tasks import Message, Row, Split, Task, TaskOptions
from grpo_env.tasks.tool_calls import CallFormat
from tests.support.canned import PROMPT, generate_answer, inference_routes
from tests.support.http_stub import Answer, Route, StubServer, stub_server
from tests.support.wait import DEADLINE_S


class CannedTemplate:
    """Every prompt has the tokens of the canned answers."""

    tokenizer = None

    def prompt_ids(self, _prompt: str | Sequence[Message], _tools: object = ()) -> list[int]:
        return PROMPT

    call_format = CallFormat.TAGS

    def opening(self, _prompt: str | Sequence[Message]) -> str:
        return ""

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        return [str(token_id) for token_id in token_ids]


class Rewarded(Task):
    """Prompt "3+4=", so that canned answers have known scores, with the reward that the test
    gives."""

    def __init__(self, reward: Callable[..., Any], *, blocks: bool = True) -> None:
        super().__init__(TaskOptions())
        self._reward = reward
        self.blocks = blocks

    def rows(self, split: Split) -> Sequence[Row] | None:
        return [{"prompt": "3+4="}] if split == "train" else None

    def reward(self, answer: Any, row: Row) -> Any:
        return self._reward(answer, row)


def sevens(answer: str, _row: Row) -> float:
    return float(answer == "7")


class Sevens(Rewarded):
    name = "sevens"
    max_completion_tokens = 4
    held_out = 0.0

    def __init__(self) -> None:
        super().__init__(lambda *asked: {"accuracy": sevens(*asked)}, blocks=False)


class RunApi:
    """A stand-in for run-api. Its trainer takes a batch of 4 sequences as soon as two groups are
    queued."""

    def __init__(self, num_steps: int = 3, polls_before_trainer: int = 0) -> None:
        self.num_steps = num_steps
        self.waits = polls_before_trainer
        self.groups: list[dict[str, Any]] = []
        self.disconnected: list[int] = []
        self.takes_batches = True
        self.steps_before = 0
        self.prolonged_to: int | None = None
        self.status_polls = 0
        self.servers: list[dict[str, Any]] = []

    def routes(self) -> dict[str, Route]:
        return {
            "POST /register-env": self.register,
            "GET /info": lambda _body: (200, {"batch_size": 4, "max_token_len": 50}),
            "GET /status-env": self.status,
            "POST /scored_data": self.submit,
            "POST /disconnect-env": self.disconnect,
        }

    def register(self, body: dict[str, Any]) -> Answer:
        self.waits -= 1
        if self.waits >= 0:
            return 200, {"status": "wait for trainer to start"}
        run = {"starting_step": self.steps_before, "num_steps": self.num_steps}
        name = f"{body['desired_name']}_0"
        return 200, {"status": "success", "env_id": 0, "wandb_name": name, **run}

    def status(self, _body: dict[str, Any]) -> Answer:
        self.status_polls += 1
        step, queue = divmod(len(self.groups), 2) if self.takes_batches else (0, len(self.groups))
        told: dict[str, Any] = {"servers": self.servers}
        if self.prolonged_to is not None:
            told["num_steps"] = self.prolonged_to
        sizes = {"queue_size": queue, "self_queue_size": queue, "max_group_size": 2}
        weights = {"unallocated_fraction": 1.0, "env_weight": 1.0}
        return 200, {"current_step": self.steps_before + step, **sizes, **weights, **told}

    def submit(self, body: dict[str, Any]) -> Answer:
        self.groups.append(body)
        return 200, {"status": "received"}

    def disconnect(self, body: dict[str, Any]) -> Answer:
        self.disconnected.append(body["env_id"])
        return 200, {"status": "success"}


def right_and_wrong(_body: dict[str, Any]) -> Answer:
    return 200, generate_answer(["7", "8"])


async def run(
    api: RunApi, generate: Route, *options: str, **how: Any
) -> tuple[StubServer, StubServer]:
    """Run an environment until the run is complete. As `feed`."""
    return await feed(api.routes(), inference_routes(generate), *options, **how)


async def feed(
    api_routes: dict[str, Route],
    engine_routes: dict[str, Route],
    *options: str,
    task: Task | None = None,
    template: ChatTemplate | None = None,
    inference_url: str | None = None,
) -> tuple[StubServer, StubServer]:
    """Returns run-api and the inference server, with the requests that they received.

    Args: inference_url: of another inference server
    """
    with (
        stub_server(api_routes) as run_api,
        stub_server(engine_routes) as inference,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(worker, "_DISCONNECT_S", DEADLINE_S)  # a slow machine receives it too
        settings = load_env_settings(
            [
                *("arithmetic", "serve", "--group-size=2", "--model=m"),
                *("--request-deadline-s=60", "--run-api-deadline-s=60"),
                f"--inference-url={inference_url or inference.url}",
                f"--run-api-url={run_api.url}",
                *options,
            ]
        )
        async with asyncio.timeout(DEADLINE_S):
            tasks = TaskSet((task or Sevens(),), (1.0,))
            await worker.serve(settings, tasks, template or CannedTemplate())
    return run_api, inference
