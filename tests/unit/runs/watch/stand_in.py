"""A service with the routes of grpo-watch, whose runs a test changes as it likes."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, HTTPException, Query, Request, Response
from sse_starlette import EventSourceResponse

from grpo_core.rollouts.page.encode import GroupEncoder
from grpo_core.rollouts.page.live import live_document
from grpo_core.rollouts.page.token_texts import TokenTexts
from tests.support.conversations import SPECIAL, TOKENIZER

Selected = Annotated[list[str], Query()]


class Runs:
    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.listeners: list[tuple[list[str], queue.Queue[tuple[str, Any]]]] = []
        self.requests: list[str] = []

    def add(self, id: str, **fields: Any) -> None:
        self.runs[id] = {
            "points": {},
            "intervals": {},
            "rollouts": {},
            "settings": {},
            "state": {},
        } | fields

    def step(
        self, id: str, step: int, value: float, records: list[Any] | None = None, **state: Any
    ) -> None:
        run = self.runs[id]
        for name in ("reward/mean", "staleness/mean"):
            points = run["points"].setdefault(name, [])
            points[:] = [one for one in points if one[0] < step]
            points.append([step, 1.5 * step, 100 * step, value])
        if records:
            run["rollouts"][step] = records
        self.tell(
            id, "points", {"run": id, "points": {n: [p[-1]] for n, p in run["points"].items()}}
        )
        self.say(id, step=step, **state)

    def say(self, id: str, **state: Any) -> None:
        self.runs[id]["state"] |= state
        self.tell(id, "state", self.state(id))

    def state(self, id: str) -> dict[str, Any]:
        run = self.runs[id]
        return {
            **{"run": id, "state": "training", "step": None, "steps": 40, "services": []},
            **{"times": {}, "queue": {}, "staleness": None, "tokens_per_s": None, "eta_s": None},
            **{"eta_text": None, "warnings": [], "alerts": []},
            "newest_rollouts": max(run["rollouts"], default=None),
        } | run["state"]

    def tell(self, id: str, name: str, data: Any) -> None:
        for runs, events in self.listeners:
            if id in runs:
                events.put((name, data))


TITLES = {"reward/mean": ("Mean reward", ""), "staleness/mean": ("Staleness", "steps")}


def app_of(runs: Runs) -> FastAPI:
    app = FastAPI()

    @app.middleware("http")
    async def note(request: Request, call: Any) -> Any:
        runs.requests.append(f"{request.url.path}?{request.url.query}")
        return await call(request)

    @app.get("/")
    def page() -> Response:
        content, policy = live_document()
        return Response(
            content, media_type="text/html", headers={"content-security-policy": policy}
        )

    @app.get("/favicon.ico")
    def icon() -> Response:
        return Response(status_code=204)

    @app.get("/api/runs")
    def listed() -> Any:
        keys = ("state", "step", "steps")
        return [
            {"id": id, "name": run.get("name", id), "title": "GRPO on sums"}
            | {key: runs.state(id)[key] for key in keys}
            for id, run in runs.runs.items()
        ]

    @app.get("/api/runs/{id}")
    def about(id: str) -> Any:
        run = runs.runs[id]
        return {
            **{"id": id, "title": "GRPO on sums", "facts": run.get("facts", [])},
            **{"special": SPECIAL, "settings": run["settings"]},
            **{"has_server": True, "has_trainer": True},
        }

    @app.get("/api/runs/{id}/curves")
    def curves(id: str, x: str, points: int) -> Any:
        at = {"step": 0, "time": 1, "tokens": 2}[x]
        run = runs.runs[id]
        return {
            "curves": [
                {
                    **{"name": name, "title": TITLES.get(name, (name, ""))[0]},
                    **{"unit": TITLES.get(name, (name, ""))[1]},
                    "points": [
                        [one[at], one[3], one[0]] for one in found[:: max(1, len(found) // points)]
                    ],
                    "intervals": run["intervals"].get(name),
                }
                for name, found in run["points"].items()
            ]
        }

    @app.get("/api/runs/{id}/steps")
    def steps(id: str) -> Any:
        return {"steps": sorted(runs.runs[id]["rollouts"])}

    @app.get("/api/runs/{id}/steps/{step}")
    def rollouts(id: str, step: int) -> Any:
        if step not in runs.runs[id]["rollouts"]:
            raise HTTPException(404, f"no rollouts of step {step}")
        records = runs.runs[id]["rollouts"][step]
        groups: dict[int, list[Any]] = {}
        for record in records:
            groups.setdefault(record.group, []).append(record)
        encoder = GroupEncoder(TokenTexts(TOKENIZER), SPECIAL)
        return {
            "step": step,
            "groups": [encoder.summary(one) for one in groups.values()],
            "details": [encoder.details(one) for one in groups.values()],
            "texts": encoder.texts,
            "has_server": encoder.has_server,
            "has_trainer": encoder.has_trainer,
        }

    @app.get("/api/differences")
    def differences(run: Selected) -> Any:
        settings = [runs.runs[id]["settings"] for id in run]
        names = sorted({name for one in settings for name in one})
        rows = [{"setting": n, "values": [one.get(n) for one in settings]} for n in names]
        return {
            "runs": run,
            "rows": [row for row in rows if len({json.dumps(v) for v in row["values"]}) > 1],
        }

    @app.get("/api/events")
    async def events(run: Selected) -> Any:
        mine: queue.Queue[tuple[str, Any]] = queue.Queue()
        for id in run:
            mine.put(("state", runs.state(id)))
        runs.listeners.append((run, mine))

        async def stream() -> AsyncIterator[dict[str, str]]:
            while True:
                try:
                    name, data = mine.get_nowait()
                    yield {"event": name, "data": json.dumps(data)}
                except queue.Empty:
                    await asyncio.sleep(0.02)

        return EventSourceResponse(stream())

    return app


@contextmanager
def served(runs: Runs, port: int = 0) -> Iterator[str]:
    config = uvicorn.Config(
        app_of(runs), port=port, log_level="critical", timeout_graceful_shutdown=0
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    address = server.servers[0].sockets[0].getsockname()
    try:
        yield f"http://{address[0]}:{address[1]}/"
    finally:
        server.should_exit = True
        thread.join()
