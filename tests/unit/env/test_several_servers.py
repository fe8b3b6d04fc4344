"""A whole environment on several inference servers, which die and join under load; evaluations on
several servers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from structlog.testing import capture_logs

from grpo_core.evaluation.results import read_summaries
from grpo_env.assembly import TaskSet
from grpo_env.evaluation import evaluate_once
from grpo_env.settings import load_env_settings
from tests.support.canned import generate_answer, inference_routes
from tests.support.http_stub import Answer
from tests.support.wait import wait_for_async
from tests.unit.env.feeding import CannedTemplate, RunApi, feed, right_and_wrong
from tests.unit.env.inference.engine import Engine, engines
from tests.unit.env.test_evaluation import TwoSevens, act

IN_EPOCH_1 = 1


def listed(engine: Engine, step: int = 0) -> dict[str, Any]:
    entry = {"name": engine.url, "url": engine.url, "version": [IN_EPOCH_1, step]}
    return entry | {"state": "serving"}


async def test_servers_die_and_join_under_load_and_no_group_is_lost() -> None:
    api = RunApi(num_steps=10**6)
    with capture_logs() as logs:
        async with engines(3) as (named, dying, late):
            await late.vanish()
            dying.open.clear()
            api.servers = [listed(named), listed(dying)]
            options = ("--no-drop-equal-scores", "--env.max-concurrent-groups=4")
            work = asyncio.create_task(feed(api.routes(), {}, *options, inference_url=named.url))
            await wait_for_async(lambda: len(dying.received) >= 2)
            await dying.vanish()
            await late.start()
            api.servers = [listed(named), listed(late)]
            await wait_for_async(lambda: len(late.received) >= 2)
            api.prolonged_to = 1
            await work
    found = [(line["event"], line.get("url")) for line in logs]
    assert "group.lost" not in [event for event, _ in found]
    assert [url for event, url in found if event == "server.joined"] == [dying.url, late.url]
    assert ("server.left", dying.url) in found
    counted = {line["url"]: line["requests"] for line in logs if line["event"] == "server.requests"}
    assert counted[dying.url] == 0
    assert counted[late.url] >= 1
    assert counted[named.url] + counted[late.url] >= len(api.groups)


async def test_an_evaluation_is_answered_by_the_servers_of_the_newest_version(
    tmp_path: Path,
) -> None:
    output = tmp_path / "eval.jsonl"
    async with engines(3) as servers:
        servers[1].version = servers[2].version = (IN_EPOCH_1, 5)
        urls = ",".join(server.url for server in servers)
        words = ["arithmetic", "evaluate", "--model=m", f"--inference-url={urls}"]
        settings = load_env_settings([*words, "--eval-samples=1", f"--eval-output={output}"])
        await evaluate_once(settings, TaskSet((TwoSevens(),), (1.0,)), CannedTemplate())
        assert [len(server.received) for server in servers] == [0, 1, 1]
    [summary] = read_summaries(output)
    assert summary.answers_by_version == {"1.5": 2}


async def test_a_run_is_evaluated_on_the_servers_of_its_step(tmp_path: Path) -> None:
    """The listed server has the step; that of --inference-url is late."""
    output, api = tmp_path / "eval.jsonl", RunApi(num_steps=2)
    routes = inference_routes(right_and_wrong)
    routes["GET /bridge/info"] = lambda _body: (200, {"policy_version": [IN_EPOCH_1, 0]})
    async with engines(1) as (newest,):
        newest.version = (IN_EPOCH_1, 2)
        api.servers = [listed(newest, step=2)]
        options = ("--eval-every=100", f"--eval-output={output}", "--eval-samples=3")
        await feed(api.routes(), routes, *options, task=TwoSevens())
        assert [body["n"] for body in newest.received].count(3) >= 2
    last = read_summaries(output)[-1]
    assert (last.step, last.answers_by_version) == (2, {"1.2": 6})


async def test_several_versions_of_one_evaluation_are_reported(tmp_path: Path, capsys: Any) -> None:
    output, steps = tmp_path / "eval.jsonl", iter([[4, 4], [4, 5]])

    def generate(body: dict[str, Any]) -> Answer:
        ends = [[IN_EPOCH_1, step] for step in next(steps)]
        return 200, generate_answer(["7"] * body["n"], policy_version=[ends] * body["n"])

    options = ("--eval-samples=2", f"--eval-output={output}", "--eval-requests=1")
    with capture_logs() as logs:
        await act(evaluate_once, generate, *options)
    counts = {"1.4": 2, "1.4 to 1.5": 2}
    [summary] = read_summaries(output)
    assert summary.answers_by_version == counts
    [warned] = [line for line in logs if line["event"] == "evaluation.versions_differ"]
    assert warned["answers"] == counts
    assert "several policy versions answered: 2 by 1.4, 2 by 1.4 to 1.5" in capsys.readouterr().out
