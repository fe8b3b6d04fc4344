"""The service of the live page: its answers, its events, and whom it lets in."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from pydantic import SecretStr

from grpo_core.provenance import chain
from grpo_core.provenance.records import (
    PROVENANCE,
    Line,
    Publication,
    Start,
    read_lines,
    text_of,
)
from grpo_core.rollouts.files import ROLLOUTS, write_step
from grpo_core.settings import load_settings
from grpo_core.wire.policy_version import PolicyVersion
from grpo_runs.process.records import ProcessRecords
from grpo_runs.run_directory import RunDirectory
from grpo_runs.settings.watch import WatchSettings
from grpo_runs.watch.access import COOKIE
from grpo_runs.watch.api import PageFollower, watch_app
from grpo_runs.watch.live_run import LiveRun
from grpo_runs.watch.serve import PageNotServed, PageServer, live_runs
from tests.support.conversations import record
from tests.support.pages import ROOT
from tests.unit.conftest import Refused
from tests.unit.runs.records import take_steps
from tests.unit.runs.test_measures import RUNNING, run_api
from tests.unit.runs.watch.test_live_run import log

HERE = {"host": "127.0.0.1:8765"}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "mine")
    run.path.mkdir()
    run.config.write_text("task: [sums]\noptim: {lr: 0.001}\nseed: 3\n")
    take_steps(run, 1, 2)
    write_step(run.path / ROLLOUTS, 2, [record(step=2)])
    return run


def client_of(run: RunDirectory, **options: Any) -> TestClient:
    live = LiveRun("mine", run)
    return TestClient(watch_app([live], **options), "http://127.0.0.1", follow_redirects=False)


def test_a_run_and_its_curves(run: RunDirectory) -> None:
    client = client_of(run)
    (listed,) = client.get("/api/runs").json()
    assert (listed["title"], listed["step"], listed["steps"]) == ("GRPO on sums", 2, 40)
    about = client.get("/api/runs/mine").json()
    assert about["settings"]["lr"] == 0.001
    assert ["Seed", "3"] in about["facts"]
    assert "Steps" not in dict(about["facts"]), "the heading has them"
    curves = client.get("/api/runs/mine/curves?x=step&points=100").json()["curves"]
    assert curves[0]["title"] == "Mean reward"
    assert curves[0]["points"] == [[1, 0.1, 1], [2, 0.2, 2]]
    assert client.get("/api/runs/mine/curves?x=weight").status_code == 422
    unknown = client.get("/api/runs/other")
    assert (unknown.status_code, "no run 'other'" in unknown.json()["detail"]) == (404, True)


OF_ONE_RUN = ("settings", "untrained", "groups", "details", "texts")
"""Fields whose content has no fixed names, or those of the page."""
DOCUMENTED = (ROOT / "docs/how-to/watch.md").read_text()


def names(content: Any) -> set[str]:
    """All names in an answer."""
    if isinstance(content, dict):
        inner = (one for name, one in content.items() if name not in OF_ONE_RUN)
        return {*content}.union(*map(names, inner))
    return set().union(*map(names, content)) if isinstance(content, list) else set()


def told_in(text: str) -> set[str]:
    return {*re.findall(r"`(\w+)`", text)}


def test_every_field_of_the_answers_is_documented(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (run.path / PROVENANCE).write_text("".join(map(text_of, published(up_to=20))))
    write_step(run.path / ROLLOUTS, 2, [record(step=2, versions=[[1, 20], [1, 20]])])
    app = watch_app(live_runs([run.path, tmp_path / "other"]))
    routes = dict(re.findall(r"^\| `(/api/\S+)` \| (.*) \|$", DOCUMENTED, re.M))
    served = {one.path for one in app.routes if isinstance(one, APIRoute)}
    assert {re.sub(r"\?.*", "", route) for route in routes} == {
        path for path in served if path.startswith("/api/") and path != "/api/events"
    }
    for route, told in routes.items():
        path = route.format(id="mine", other="other", step=2)
        answer = TestClient(app, "http://127.0.0.1").get(path).json()
        assert names(answer) == told_in(told), route


def test_every_field_of_the_state_is_documented(run: RunDirectory) -> None:
    hours = itertools.count(0, 3600)  # an hour passes from look to look
    live = LiveRun("mine", run, "t", clock=lambda: float(next(hours)))
    processes = ProcessRecords(run)
    processes.watch({"trainer": os.getpid()})
    run.logs.mkdir()
    log(run, "trainer", "2026-01-01T10:00:00 [warning  ] loss.sign    hint=minus")
    with run_api() as (url, api):
        processes.found_run_api(url)
        api.run([], **RUNNING, oldest_queued_group_age_seconds=7200.0)
        state = live.state()
    _, _, told = DOCUMENTED.partition("| Field of `state` |")
    assert names(state) == told_in(told)


def test_rollouts_that_are_not_trained_on_are_there_before_the_first_step(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "mine")
    write_step(run.untrained / "sums" / "dropped", 1, [record(step=1)])
    client = client_of(run)
    state = LiveRun("mine", run).state()
    assert (state["newest_rollouts"], [*state["untrained"]]) == (None, ["dropped of sums"])
    assert client.get("/api/runs/mine/steps").json() == {"steps": []}
    kind = {"kind": "dropped of sums"}
    assert client.get("/api/runs/mine/steps", params=kind).json() == {"steps": [1]}
    found = client.get("/api/runs/mine/steps/1", params=kind).json()
    assert len(found["groups"]) == 1
    assert client.get("/api/runs/mine/steps/1", params={"kind": "../.."}).status_code == 404


def test_the_pools_of_a_curriculum_are_curves_unless_their_file_is_broken(
    run: RunDirectory,
) -> None:
    client, file = client_of(run), run.curricula / "sums" / "pools.jsonl"
    file.parent.mkdir(parents=True)
    for line, shown in (('{"step": 2, "curriculum/sums/easy": 7}', [[2, 7, 2]]), ("[]", None)):
        file.write_text(f"{line}\n")
        curves = client.get("/api/runs/mine/curves?x=step&points=100").json()["curves"]
        found = {one["title"]: one["points"] for one in curves}
        assert found.get("Curriculum: easy items of sums") == shown


def test_rollouts_of_one_step(run: RunDirectory) -> None:
    client = client_of(run)
    assert client.get("/api/runs/mine/steps").json() == {"steps": [2]}
    shown = client.get("/api/runs/mine/steps/2").json()
    assert (len(shown["groups"]), len(shown["details"])) == (1, 1)
    assert client.get("/api/runs/mine/steps/1").status_code == 404
    (run.path / ROLLOUTS / "step-000002.jsonl.gz").write_bytes(b"broken")
    broken = client.get("/api/runs/mine/steps/2")
    assert (broken.status_code, "step-000002" in broken.json()["detail"]) == (404, True)


def test_the_origin_of_a_completion(run: RunDirectory) -> None:
    client, at = client_of(run), "/api/runs/mine/steps/2/origin?group=0&index"
    missing = client.get(f"{at}=0")
    assert (missing.status_code, PROVENANCE in missing.json()["detail"]) == (404, True)
    (run.path / PROVENANCE).write_text("".join(map(text_of, published(up_to=20))))
    write_step(run.path / ROLLOUTS, 2, [record(step=2, versions=[[1, 20], [1, 20]])])
    lines = client.get(f"{at}=0").json()["lines"]
    assert lines[1] == "all its tokens were sampled by version 1.20"
    assert "grpo-provenance" in lines[8]
    assert "base model tiny" in lines[-2]
    assert client.get(f"{at}=7").status_code == 404


def test_a_click_compares_no_lines_and_reads_a_file_once(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a long run, both take seconds of the process that trains it."""
    client, reads = client_of(run), list[Path]()
    monkeypatch.setattr(Publication, "__eq__", lambda *_: pytest.fail("lines are compared"))

    def read(path: Path) -> list[Line]:
        reads.append(path)
        return read_lines(path)

    monkeypatch.setattr(chain, "read_lines", read)
    write_step(run.path / ROLLOUTS, 2, [record(step=2, versions=[[1, 20], [1, 20]])])
    *lines, last = map(text_of, published(up_to=21))

    def click() -> list[str]:
        found: list[str] = client.get("/api/runs/mine/steps/2/origin?group=0&index=0").json()[
            "lines"
        ]
        return found

    (run.path / PROVENANCE).write_text("".join(lines))
    assert click() == click()
    assert len(reads) == 1
    with (run.path / PROVENANCE).open("a") as more:
        more.write(last)
    assert "base model tiny" in click()[-2]
    assert len(reads) == 2


def published(up_to: int) -> Iterator[Line]:
    yield Start.model_validate(
        {
            **{"step": 0, "model": "tiny", "run_uuid": None, "checkpoint": None, "config": ""},
            **{"dtype": "float32", "tensors": [["w", "F32", [2]]]},
            "code": {"version": "1", "trainer": "a", "core": "b"},
            "machine": {
                **{"torch": "2", "transformers": "5", "python": "3", "cpu": "AVX2"},
                **{"threads": 1, "device": "cpu", "ranks": 1, "fsdp": False},
            },
        }
    )
    parent = None
    for step in range(up_to + 1):
        version = PolicyVersion(1, step)
        batch = {"batch_id": step, "batch": "beef"} if step else {}
        yield Publication.model_validate(
            {"version": version, "root": f"{step}", "digests": ["d"], "seed": 0, "parent": parent}
            | batch
        )
        parent = {"version": version, "root": f"{step}"}


def test_settings_that_differ(run: RunDirectory, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.yaml").write_text("task: [sums]\noptim: {lr: 0.01}\nkl_coef: 0.1\n")
    client = TestClient(watch_app(live_runs([run.path, other])), "http://127.0.0.1")
    found = client.get("/api/differences?run=mine&run=other").json()
    assert found["runs"] == ["mine", "other"]
    rows = {row["setting"]: row["values"] for row in found["rows"]}
    assert rows == {"lr": [0.001, 0.01], "kl-coef": [None, 0.1], "seed": [3, None]}


def test_the_page_may_ask_this_service_alone(run: RunDirectory) -> None:
    answer = client_of(run).get("/")
    policy = answer.headers["content-security-policy"]
    assert {"default-src 'none'", "connect-src 'self'"} <= {
        one.strip() for one in policy.split(";")
    }
    assert "unsafe" not in policy


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        HERE | {"origin": "https://evil.example"},
        HERE | {"sec-fetch-site": "cross-site"},
    ],
)
def test_pages_of_other_sites_are_refused(run: RunDirectory, headers: dict[str, str]) -> None:
    assert client_of(run).get("/api/runs", headers=headers).status_code == 403


def test_a_token_is_needed_and_kept_as_a_cookie(run: RunDirectory) -> None:
    client = client_of(run, token=SecretStr("secret"))
    refused = client.get("/api/runs")
    assert (refused.status_code, "?token=" in refused.json()["detail"]) == (401, True)
    assert client.get("/?token=wrong").status_code == 401
    bearer = client.get("/api/runs", headers={"authorization": "Bearer secret"})
    assert bearer.status_code == 200

    welcome = client.get("/?token=secret&run=mine")
    assert (welcome.status_code, welcome.headers["location"]) == (303, "/?run=mine")
    cookie = welcome.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict"} <= {one.strip() for one in cookie.split(";")}
    assert client.get("/api/runs").status_code == 200  # the client has kept it


@pytest.mark.parametrize(
    "other", ['prefs={"a":"b"}', "cart[]=1", "a=b c", "name=J\xfcrgen", "alone"]
)
def test_cookies_of_other_ports_do_not_hide_the_token(run: RunDirectory, other: str) -> None:
    client = client_of(run, token=SecretStr("secret"))
    cookies = f"{other}; {COOKIE.format(port=80)}=secret".encode("latin-1")
    assert client.get("/api/runs", headers={b"cookie": cookies}).status_code == 200


def test_a_token_leads_to_no_other_host(run: RunDirectory) -> None:
    client = client_of(run, token=SecretStr("secret"))
    for path, place in (("//other.example", "/other.example"), ("/%0d%0aa: b", "/%0D%0Aa%3A%20b")):
        client.cookies.clear()
        welcome = client.get(f"http://127.0.0.1{path}?token=secret")
        assert (welcome.status_code, welcome.headers["location"]) == (303, place)


@contextmanager
def events_of(page: PageServer) -> Iterator[Iterator[tuple[str, Any]]]:
    def read(lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
        name = ""
        for line in lines:
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield name, json.loads(line.removeprefix("data: "))

    with (
        page.in_a_thread(),
        httpx.Client(trust_env=False, timeout=60) as client,
        client.stream("GET", f"{page.url}api/events?run=mine") as answer,
    ):
        yield read(answer.iter_lines())


def test_events_tell_new_steps(run: RunDirectory) -> None:
    page = PageServer([LiveRun("mine", run)], "127.0.0.1", 0)
    with events_of(page) as events:
        name, state = next(events)
        assert (name, state["step"]) == ("state", 2)
        take_steps(run, 3)
        told = dict((next(events), next(events)))
    assert told["state"]["step"] == 3
    ((step, _, _, value),) = told["points"]["points"]["reward/mean"]
    assert (step, value) == (3, 0.3)


def test_after_a_resume_the_page_asks_for_the_curves_again(run: RunDirectory) -> None:
    """Instead of getting all steps in one event."""
    live = LiveRun("mine", run, clock=iter(range(100)).__next__)
    follower = PageFollower(live)
    follower.news()
    run.metrics.unlink()
    take_steps(run, 1)
    assert [name for name, _ in follower.news()] == ["state", "evaluations"]
    take_steps(run, 2)
    assert [name for name, _ in follower.news()] == ["state", "points"]


def test_each_open_page_gets_every_point(run: RunDirectory) -> None:
    """Also if another page has read it, or has asked for the state meanwhile."""
    live = LiveRun("mine", run, clock=lambda: 100.0)
    first, second = PageFollower(live), PageFollower(live)
    for page in (first, second):
        assert [name for name, _ in page.news()] == ["state"]
    take_steps(run, 3)
    live.read_files()  # a page asks for the curves
    for page in (first, second):
        ((name, told),) = page.news()
        assert (name, told["points"]["reward/mean"][0][0]) == ("points", 3)
        assert page.news() == []


def test_a_port_that_is_taken() -> None:
    taken = PageServer([], "127.0.0.1", 0)
    port = int(taken.url.rsplit(":", 1)[1].strip("/"))
    with pytest.raises(PageNotServed, match="choose another --port"):
        PageServer([], "127.0.0.1", port)
    taken._socket.close()


def test_two_runs_of_one_name(tmp_path: Path) -> None:
    paths = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    assert [live.id for live in live_runs(paths)] == ["run", "run-2"]


def test_no_browser_gets_a_token_on_its_command_line(run: RunDirectory, refused: Refused) -> None:
    for words in ("--token=secret", "--host=0.0.0.0"):
        told = refused(load_settings, WatchSettings, [str(run.path), "--open", words])
        assert "grpo-watch: --open: other users of this machine could read the token" in told
    assert load_settings(WatchSettings, [str(run.path), "--open"]).open
