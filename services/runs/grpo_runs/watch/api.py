"""The HTTP interface of `grpo-watch`: the live page, and what it asks for. docs/how-to/watch.md has
its routes and fields."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import closing, suppress
from itertools import groupby
from typing import Annotated, Any

import anyio.to_thread
from fastapi import FastAPI, HTTPException, Query, Response
from pydantic import SecretStr
from sse_starlette import EventSourceResponse
from starlette.middleware.gzip import GZipMiddleware

from grpo_core.errors import BrokenProvenance, BrokenRollouts, GrpoError
from grpo_core.provenance.chain import chain_of
from grpo_core.rollouts.files import ROLLOUTS, read_step
from grpo_core.rollouts.page import encode
from grpo_core.rollouts.page.document import live_document
from grpo_core.rollouts.page.encode import REWARD, GroupEncoder
from grpo_core.rollouts.page.token_texts import TokenTexts
from grpo_core.security import SameSiteOnly
from grpo_runs.report.page import facts_of, title_of, token_texts
from grpo_runs.watch.access import TokenCookie
from grpo_runs.watch.live_run import LiveRun
from grpo_runs.watch.metrics_log import Axis, Row

EVENTS_EVERY_S = 1.0
MOST_POINTS = 5000
MOST_ROWS = 20
"""New steps that one event brings. After more, or if a resumed run has written its metrics again,
the page asks for the curves again."""
NEWEST_ORIGINS, OLDEST_ORIGINS = 8, 3
"""Lines of a chain that the page shows."""
Chosen = Annotated[list[str], Query()]


def watch_app(
    runs: Sequence[LiveRun],
    token: SecretStr | None = None,
    hosts: Sequence[str] = (),
    every_s: float = EVENTS_EVERY_S,
) -> FastAPI:
    """Args:
    token: browsers and programs must know it; None: none is needed
    hosts: public DNS names of this server
    every_s: seconds between two looks at a run
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    by_id = {run.id: run for run in runs}

    def named(id: str) -> LiveRun:
        if id not in by_id:
            raise HTTPException(404, f"no run {id!r}; GET /api/runs lists the runs")
        return by_id[id]

    @app.get("/")
    def page() -> Response:
        content, policy = live_document()
        headers = {"content-security-policy": policy, "referrer-policy": "no-referrer"}
        return Response(content, media_type="text/html", headers=headers)

    @app.get("/favicon.ico")
    def icon() -> Response:
        return Response(status_code=204)

    @app.get("/api/runs")
    def list_runs() -> list[dict[str, Any]]:
        return [
            {"id": run.id, "name": run.name, "title": title_of(run.settings())} | run.listed()
            for run in runs
        ]

    @app.get("/api/runs/{id}")
    def about(id: str) -> dict[str, Any]:
        return _about(named(id))

    @app.get("/api/runs/{id}/curves")
    def curves(
        id: str, x: Axis = "step", points: Annotated[int, Query(ge=10, le=MOST_POINTS)] = 1000
    ) -> dict[str, Any]:
        return {"curves": curves_of(named(id), x, points)}

    @app.get("/api/runs/{id}/steps")
    def steps(id: str, kind: str = "") -> dict[str, list[int]]:
        return {"steps": named(id).steps_with_rollouts(kind)}

    @app.get("/api/runs/{id}/steps/{step}")
    def rollouts(id: str, step: int, kind: str = "") -> dict[str, Any]:
        return _rollouts(named(id), step, kind)

    @app.get("/api/runs/{id}/steps/{step}/origin")
    def origin(id: str, step: int, group: int, index: int) -> dict[str, list[str]]:
        return {"lines": _origin(named(id), step, group, index)}

    @app.get("/api/differences")
    def differences(run: Chosen) -> dict[str, Any]:
        return different_settings({id: named(id).settings() for id in run})

    @app.get("/api/events")
    async def events(run: Chosen) -> EventSourceResponse:
        followed = [PageFollower(named(id)) for id in run]
        return EventSourceResponse(_events(followed, every_s))

    app.add_middleware(GZipMiddleware, minimum_size=2000)
    app.add_middleware(TokenCookie, token=token)
    app.add_middleware(SameSiteOnly, hosts=hosts)
    return app


async def _events(
    followed: Sequence[PageFollower], every_s: float
) -> AsyncIterator[dict[str, str]]:
    while True:
        for one in followed:
            for name, data in await anyio.to_thread.run_sync(one.news):
                yield {"event": name, "data": json.dumps(data)}
        await asyncio.sleep(every_s)


class PageFollower:
    """What one page knows of a run already."""

    def __init__(self, live: LiveRun) -> None:
        self._live = live
        self._state: Mapping[str, Any] | None = None
        self._serial = 0
        self._restarts = 0

    def news(self) -> list[tuple[str, Any]]:
        """Events since the last call: name and data. The first call gives the state alone, because
        the page has just asked for the curves."""
        state, before = self._live.state(), self._state
        rows, restarts = self._live.rows_since(self._serial)
        has_jumped = restarts != self._restarts or len(rows) > MOST_ROWS
        self._restarts, self._state = restarts, state
        if rows:
            self._serial = rows[-1].serial
        events: list[tuple[str, Any]] = [] if state == before else [("state", state)]
        if before is None:
            return events
        if has_jumped or state["last_evaluation"] != before["last_evaluation"]:
            events.append(("evaluations", {"run": self._live.id}))
        elif rows:
            events.append(("points", {"run": self._live.id, "points": _points(rows)}))
        return events


def _points(rows: Sequence[Row]) -> dict[str, list[list[float]]]:
    found: dict[str, list[list[float]]] = {}
    for row in rows:
        for name, value in row.values.items():
            found.setdefault(name, []).append([row.step, row.time, row.tokens, value])
    return found


def _about(live: LiveRun) -> dict[str, Any]:
    live.read_files()
    settings, texts = live.settings(), _texts(live)
    rewards = [(row.step, row.values[REWARD]) for row in live.log.rows if REWARD in row.values]
    facts: dict[str, str] = {}
    with suppress(GrpoError):  # the name of the run cannot be read
        facts = {**facts_of(live.run, settings, {REWARD: rewards}, live.evaluations())}
        facts.pop("Steps", None)  # the page's heading has the newest one, and how many in all
    return {
        "id": live.id,
        "title": title_of(settings),
        "facts": [*facts.items()],
        "special": sorted(texts.special) if texts else [],
        "settings": settings,
    }


def curves_of(live: LiveRun, axis: Axis, most: int) -> list[dict[str, Any]]:
    """Each with name, title, unit, points ([position, value, step]) and intervals ([position, low,
    high]). Those of metrics come first in the order of the report, then evaluations and the pools
    of curricula."""
    live.read_files()
    found: dict[str, list[Any]] = {**live.log.curves(axis, most)}
    evaluations = live.evaluations()
    places = live.log.position_of
    for name, points in {**evaluations.curves, **live.pools()}.items():
        at = ((places(step, axis), value, step) for step, value in points)
        found[name] = [point for point in at if point[0] is not None]
    intervals = {
        name: [(x, low, high) for step, low, high in ends if (x := places(step, axis)) is not None]
        for name, ends in evaluations.intervals.items()
    }
    return [
        {
            "name": name,
            "title": title,
            "unit": unit,
            "points": found[name],
            "intervals": intervals.get(name),
        }
        for name in sorted(found, key=encode.place_of)
        for title, unit in [encode.title_of(name)]
    ]


def _rollouts(live: LiveRun, step: int, kind: str) -> dict[str, Any]:
    directory = live.rollouts(kind)
    if directory is None or step not in live.steps_with_rollouts(kind):
        raise HTTPException(404, f"step {step} has no rollouts; --keep-rollouts keeps the newest")
    texts = _texts(live)
    encoder = GroupEncoder(texts, texts.special if texts else ())
    try:
        records = [*read_step(directory, step)]
        groups = [list(group) for _, group in groupby(records, key=lambda one: one.group)]
        summaries = [encoder.summary(group) for group in groups]
        details = [encoder.details(group) for group in groups]
    except BrokenRollouts as error:
        raise HTTPException(404, str(error)) from None
    return {
        "step": step,
        "groups": summaries,
        "details": details,
        "texts": encoder.texts,
        "has_server": encoder.has_server,
        "has_trainer": encoder.has_trainer,
    }


def _origin(live: LiveRun, step: int, group: int, index: int) -> list[str]:
    """The newest and the oldest lines of the chain of a completion."""
    directory = live.run.rollouts
    missing = HTTPException(404, f"step {step} has no completion {group}/{index}")
    try:
        if directory is None:
            raise missing
        with closing(read_step(directory, step)) as records:
            found = next((r for r in records if (r.group, r.index) == (group, index)), None)
        if found is None:
            raise missing
        lines = chain_of(live.provenance(), found)
    except (BrokenProvenance, BrokenRollouts) as error:
        raise HTTPException(404, str(error)) from None
    left = len(lines) - NEWEST_ORIGINS - OLDEST_ORIGINS
    if left <= 1:
        return lines
    command = f"grpo-provenance {live.run.path} --completion {step}/{group}/{index}"
    between = f"… {left} more lines: {command}"
    return [*lines[:NEWEST_ORIGINS], between, *lines[-OLDEST_ORIGINS:]]


def _texts(live: LiveRun) -> TokenTexts | None:
    with suppress(OSError, GrpoError):
        return token_texts(live.run.rollouts or live.run.path / ROLLOUTS)
    return None


def different_settings(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Args: settings: by run. Returns the runs, and a row for each setting that differs."""
    names = sorted({name for one in settings.values() for name in one})
    rows = [
        {"setting": name.replace("_", "-"), "values": [one.get(name) for one in settings.values()]}
        for name in names
    ]
    differing = [
        row for row in rows if len({json.dumps(v, default=str) for v in row["values"]}) > 1
    ]
    return {"runs": [*settings], "rows": differing}
