"""An inference server that holds its answers, in a process of its own.

Prints its port. `GET /held`: the number of completions that wait; `POST /release` answers all that
wait. With `--open` nothing waits. `POST /scored_data` takes any group.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

COMPLETION_TOKENS = 128
_BODY_LIMIT = 1 << 26


class HeldAnswers:
    """`held`: completions that wait for `release`."""

    def __init__(self, is_open: bool, tokens: int) -> None:
        self.held = 0
        self._is_open = is_open
        self._tokens = tokens
        self._release = asyncio.Event()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", _fine),
            web.get("/bridge/info", _fine),
            web.get("/held", self.count),
            web.post("/release", self.release),
            web.post("/generate", self.generate),
            web.post("/scored_data", _fine),
        ]

    async def count(self, _request: web.Request) -> web.Response:
        return web.json_response({"held": self.held})

    async def release(self, _request: web.Request) -> web.Response:
        self._release.set()
        self._release = asyncio.Event()
        return web.json_response({})

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        count = body.get("n", 1)
        if not self._is_open:
            self.held += count
            await self._release.wait()
            self.held -= count
        return web.json_response(_answer(body["prompt"]["prompt_token_ids"], count, self._tokens))


def _answer(prompt: list[int], count: int, tokens: int) -> dict[str, Any]:
    """As vllm-api-server sends it. The completions differ, so their scores do."""
    token_ids = [[300 + (row + at) % 200 for at in range(tokens)] for row in range(count)]
    return {
        "text": [f"{row} and {' more' * (tokens // 2)}" for row in range(count)],
        "prompt": "a prompt",
        "finish_reasons": ["stop"] * count,
        "logprobs": [[[{str(token): -1.2345678}] for token in row] for row in token_ids],
        "prompt_token_ids": prompt,
        "token_ids": token_ids,
        "policy_version": [[[1, 3], [1, 4]]] * count,
    }


async def _fine(request: web.Request) -> web.Response:
    await request.read()
    return web.json_response({"status": "received"})


@contextmanager
def stub(*flags: str) -> Iterator[str]:
    """Start the server; yields its URL."""
    command = [sys.executable, "-m", "benchmarks.environment_bench.stub", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


async def _serve(is_open: bool, tokens: int) -> None:
    app = web.Application(client_max_size=_BODY_LIMIT)
    app.add_routes(HeldAnswers(is_open, tokens).routes())
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
    await web.SockSite(runner, listening).start()
    sys.stdout.write(f"{listening.getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    given = [int(word) for word in sys.argv[1:] if word.isdigit()]
    asyncio.run(_serve("--open" in sys.argv, given[0] if given else COMPLETION_TOKENS))
