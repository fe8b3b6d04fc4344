"""A stand-in for the engine, without vLLM: real sockets, real draining, immediate answers.

`POST /generate` returns the process id and the policy version. With `"until": path` it answers when
that file exists. With `"orphan": true` it leaves an orphaned process behind and returns its id.

It fails to start if the directory in STUB_ENGINE_DIRECTORY has a file `broken`. It serves only when
that directory has no file `held`. It ends while it loads weights if that directory has a file
`torn`.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from grpo_vllm.engine_protocol import EngineEnd, EnginePlan
from grpo_vllm.http_server import DrainingServer, serve_until
from grpo_vllm.middleware import InFlight

DIRECTORY = "STUB_ENGINE_DIRECTORY"
OBSTACLE = "STUB_ENGINE_OBSTACLE"
"""Environment variable. If set to a reason, the fork server starts engines without forking."""
BROKEN = "broken"
HELD = "held"
TORN = "torn"
BAD_RANK = "bad-rank"
DTYPE = "float32"


class StubEngine:
    def __init__(self, plan: EnginePlan) -> None:
        self.plan = plan
        self.version = list(plan.weights.version)
        self.path = str(plan.weights.path or "")
        self.in_flight = InFlight()

    async def generate(self, request: Request) -> Response:
        begun = list(self.version)
        asked = await request.json()
        orphan = leave_an_orphan() if asked.get("orphan") else None
        while "until" in asked and not Path(asked["until"]).exists():
            await asyncio.sleep(0.02)
        client = request.client
        return JSONResponse(
            {
                "pid": os.getpid(),
                "policy_version": [[begun, list(self.version)]],
                "port": client.port if client else 0,
                "orphan": orphan,
            }
        )

    async def count(self, _request: Request) -> Response:
        return JSONResponse(len(self.in_flight))

    async def status(self, _request: Request) -> Response:
        adapter = {"adapter_path": self.path} if self.path else None
        return JSONResponse(
            {
                "policy_version": self.version,
                **{"state": "serving", "reason": "", "adapter": adapter, "dtype": DTYPE},
                **{"device": "cpu", "workers": 0},
                **{"in_flight": len(self.in_flight), "generation_tokens": 7, "in_use": []},
            }
        )

    async def update(self, request: Request) -> Response:
        asked = await request.json()
        if (Path(os.environ[DIRECTORY]) / TORN).exists():
            os._exit(1)
        if (Path(asked["directory"]) / BAD_RANK).exists():
            # as the HTTP server does for its own errors
            return Response("the engine does not like it", 400)
        self.version, self.path = asked["policy_version"], asked["directory"]
        return JSONResponse({"pause_s": 0.25, "in_use": [self.path]})

    async def rename(self, request: Request) -> Response:
        self.version = (await request.json())["policy_version"]
        return JSONResponse({})

    async def serve(self) -> None:
        channel = EngineEnd(self.plan.channel)
        self.in_flight.on_dropped = channel.dropped
        app = Starlette(
            routes=[
                Route("/generate", self.generate, methods=["POST"]),
                Route("/health", lambda _request: Response()),
                Route("/bridge/in-flight", self.count),
            ]
        )

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            await self.in_flight.pass_on(app, scope, receive, send)

        public = DrainingServer(counted)

        async def post_drain(request: Request) -> Response:
            within_s = (await request.json())["within_s"]
            public.drain(within_s, channel.park, self.in_flight)
            return JSONResponse({})

        private = Starlette(
            routes=[
                Route("/engine/status", self.status, methods=["POST"]),
                Route("/engine/weights", self.update, methods=["POST"]),
                Route("/engine/version", self.rename, methods=["POST"]),
                Route("/engine/drain", post_drain, methods=["POST"]),
            ]
        )
        servers = {public: self.plan.public, DrainingServer(private): self.plan.private}
        arrival = asyncio.create_task(self._arrive(public, channel))
        await serve_until(lambda: False, servers)
        await arrival

    async def _arrive(self, public: DrainingServer, channel: EngineEnd) -> None:
        await public.adopt(self.plan.parked)
        channel.serving()


def leave_an_orphan() -> int:
    """Start a process that ends by itself; returns its id. It stays a zombie until it is reaped."""
    said = subprocess.check_output(["sh", "-c", "sleep 0.1 >/dev/null 2>&1 & echo $!"])
    return int(said)


def preload(_options: list[str]) -> str | None:
    return os.environ.get(OBSTACLE)


def run_engine(plan: EnginePlan, _options: list[str]) -> None:
    directory = Path(os.environ[DIRECTORY])
    if (directory / BROKEN).exists():
        raise SystemExit(3)
    while (directory / HELD).exists():
        time.sleep(0.02)
    asyncio.run(StubEngine(plan).serve())


if __name__ == "__main__":
    run_engine(EnginePlan.model_validate_json(sys.argv[1]), sys.argv[2:])
