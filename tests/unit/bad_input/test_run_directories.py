"""What shows a run names the file that is damaged, and leaves nothing behind."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from grpo_runs.__main__ import report, rollouts
from grpo_runs.watch.api import PageFollower, watch_app
from grpo_runs.watch.live_run import LiveRun
from grpo_runs.watch.terminal import screen_of
from tests.support.damage import damaged, damages
from tests.unit.bad_input.commands import nothing_left, told
from tests.unit.runs.watch.written_runs import WrittenRun

EXAMPLES = settings.default.max_examples // 4
SECOND_S = 1.0

COMMANDS: dict[str, tuple[Callable[[], object], Sequence[str]]] = {
    "grpo-report": (report, ()),
    "grpo-rollouts": (rollouts, ("--step", "all")),
    "grpo-rollouts --json": (rollouts, ("--worst", "--json")),
    "grpo-rollouts --diff": (rollouts, ("--diff", "1,2", "--best")),
}
ROUTES = (
    *("", "/mine", "/mine/curves?x=time&points=10", "/mine/steps", "/mine/steps/2"),
    "/mine/steps/2/origin?group=0&index=1",
)


@pytest.fixture(scope="module")
def files(run: WrittenRun) -> list[Path]:
    return sorted(path for path in run.run.path.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_names_the_file(run: WrittenRun, files: list[Path], name: str) -> None:
    main, options = COMMANDS[name]
    words = [run.run.path, *options]
    assert told(main, words).status == 0

    @settings(max_examples=EXAMPLES)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(files))
        damage = data.draw(damages(path))
        with damaged(path, damage), nothing_left(run.run.path, "report.html"):
            found = told(main, words)
        if found.status and damage != "nothing":
            assert path.stem.removesuffix(".jsonl") in found.err or "group " in found.err

    check()


@settings(max_examples=EXAMPLES // 2)
@given(data=st.data())
def test_the_live_page_and_the_terminal_show_what_is_whole(
    run: WrittenRun, files: list[Path], data: st.DataObject
) -> None:
    path = data.draw(st.sampled_from(files))
    with damaged(path, data.draw(damages(path))), nothing_left(run.run.path):
        now = iter(range(100))
        live = LiveRun("mine", run.run, clock=lambda: SECOND_S * next(now))
        follower = PageFollower(live)
        for _ in range(2):
            json.dumps(follower.news(), allow_nan=False)
        console = Console(file=io.StringIO(), width=100, height=40)
        console.print(screen_of(live, console.size, SECOND_S))
        client = TestClient(watch_app([live]), "http://127.0.0.1")
        for route in ROUTES:
            answer = client.get(f"/api/runs{route}")
            assert answer.status_code in (200, 404), answer.text
            assert answer.json()
        assert client.get("/api/differences?run=mine").status_code == 200
