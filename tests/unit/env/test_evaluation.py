"""Evaluations: of the served policy at once, and every few steps of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from grpo_core.evaluation.results import NothingEvaluated, read_summaries
from grpo_core.rollouts.files import read_step, steps_in
from grpo_env.actions import NothingProcessed, process
from grpo_env.assembly import TaskSet
from grpo_env.evaluation import evaluate_once
from grpo_env.settings import load_env_settings
from grpo_env.tasks import Row, Split
from tests.support.canned import PROMPT, generate_answer, inference_routes
from tests.support.http_stub import Answer, Route, stub_server
from tests.unit.env.feeding import CannedTemplate, RunApi, Sevens, feed, run


class TwoSevens(Sevens):
    """One training prompt, and two others for evaluation."""

    def rows(self, split: Split) -> Sequence[Row] | None:
        return [{"prompt": p} for p in (["3+4="] if split == "train" else ["2+5=", "1+6=", "3+4="])]


def answering(texts: list[str], **changes: Any) -> Route:
    return lambda body: (200, generate_answer(texts[: body["n"]], **changes))


async def act(action: Any, generate: Route, *options: str, task: Sevens | None = None) -> Any:
    with stub_server(inference_routes(generate)) as server:
        words = ["arithmetic", action.__name__.partition("_")[0], "--model=m"]
        settings = load_env_settings([*words, f"--inference-url={server.url}", *options])
        await action(settings, TaskSet((task or TwoSevens(),), (1.0,)), CannedTemplate())
        return server


async def test_evaluate_prints_and_saves_the_estimates_of_items_that_training_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "eval.jsonl"
    server = await act(
        evaluate_once,
        answering(["7", "8", "8", "8"], policy_version=[[[1, 4], [1, 5]]] * 4),
        *("--eval-samples=4", f"--eval-output={output}", "--eval-temperature=0.5"),
    )
    assert [(b["n"], b["temperature"]) for b in server.bodies("POST /generate")] == [(4, 0.5)] * 2
    [summary] = read_summaries(output)
    # One of four answers is right for each of two items.
    assert summary.metrics["pass@1"] == 0.25
    assert summary.metrics["pass@4"] == 1.0
    assert summary.metrics["part/accuracy"] == 0.25
    assert (summary.item_count, summary.step, summary.samples) == (2, 4, 4)
    assert [tuple(version) for version in summary.versions or ()] == [(1, 4), (1, 5)]
    shown = capsys.readouterr().out
    assert "pass@1" in shown
    assert str(output) in shown
    assert "answers:" in shown
    (page,) = output.with_suffix("").glob("*.html")
    assert b"Answers to" in page.read_bytes()


async def test_greedy_needs_one_answer_and_lost_items_are_counted(tmp_path: Path) -> None:
    output = tmp_path / "eval.jsonl"
    answers = iter([(200, generate_answer(["7"])), (500, {"detail": "broken"})])

    def generate(_body: dict[str, Any]) -> Answer:
        return next(answers)

    with capture_logs():
        server = await act(
            evaluate_once,
            generate,
            *("--eval-temperature=0", f"--eval-output={output}", "--eval-requests=1"),
        )
    assert [b["n"] for b in server.bodies("POST /generate")] == [1, 1]
    [summary] = read_summaries(output)
    assert (summary.item_count, summary.left_out) == (1, {"unavailable": 1})


async def test_if_no_item_is_evaluated_the_error_says_why(tmp_path: Path) -> None:
    reason = r"2 refused, the last one because: .*400.*no such model.*; check the data set"
    with pytest.raises(NothingEvaluated, match=reason):
        await act(
            evaluate_once,
            lambda _body: (400, {"detail": "no such model"}),
            f"--eval-output={tmp_path / 'eval.jsonl'}",
        )


async def test_a_run_is_evaluated_before_its_first_and_after_its_last_step(tmp_path: Path) -> None:
    """run-api's trainer takes a batch for each two groups; the server says which step it serves."""
    output, api = tmp_path / "eval.jsonl", RunApi(num_steps=4)

    def step() -> int:
        return min(4, len(api.groups) // 2)

    def generate(body: dict[str, Any]) -> Answer:
        version = [[0, step()], [0, step()]]
        texts = ["7", "8"] if body["n"] == 2 else ["7"]
        return 200, generate_answer(texts, policy_version=[version] * len(texts))

    routes = inference_routes(generate)
    routes["GET /bridge/info"] = lambda _body: (200, {"policy_version": [0, step()]})
    await feed(
        api.routes(),
        routes,
        *("--eval-every=2", f"--eval-output={output}", "--eval-samples=1"),
        f"--untrained-dir={tmp_path}",
        task=TwoSevens(),
    )
    steps = [summary.step for summary in read_summaries(output)]
    assert steps[0] == 0
    assert steps[-1] == 4
    assert steps == sorted(set(steps))
    assert len(api.groups) >= 8
    assert steps_in(tmp_path / "evaluation") == steps, "answers to both items can be read"
    assert [one.score for one in read_step(tmp_path / "evaluation", 0)] == [1.0, 1.0]


async def test_an_evaluation_that_fails_is_logged_and_ends_no_run(tmp_path: Path) -> None:
    """The answers of the evaluation break the protocol; those for training do not."""
    api = RunApi(num_steps=2)

    def generate(body: dict[str, Any]) -> Answer:
        broken = {"prompt_token_ids": [9]} if body["n"] == 1 else {}
        return 200, generate_answer(["7", "8"][: body["n"]], **broken)

    options = ("--eval-every=1", f"--eval-output={tmp_path / 'eval.jsonl'}", "--eval-samples=1")
    with capture_logs() as logs:
        await run(api, generate, *options, task=TwoSevens())
    failed = [line["error"] for line in logs if line["event"] == "evaluation.failed"]
    assert failed
    assert all("ProtocolViolation" in error for error in failed)
    assert len(api.groups) >= 4


async def test_a_run_without_held_out_items_is_not_evaluated() -> None:
    with capture_logs() as logs:
        await run(RunApi(num_steps=1), answering(["7", "8"]), "--eval-every=1")
    assert [line["event"] for line in logs if "evaluation" in line["event"]] == [
        "evaluation.left_out"
    ]


async def test_process_writes_every_group_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "groups.jsonl"
    answers = iter([["7", "8"], ["7", "7"], ["8", "8"]])
    await act(
        process,
        lambda _body: (200, generate_answer(next(answers))),
        *("--group-size=2", "--steps=3", f"--output={output}", "--max-concurrent-groups=1"),
    )
    groups = [json.loads(line) for line in output.read_text().splitlines()]
    assert [group["scores"] for group in groups] == [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    assert groups[0]["tokens"][0][: len(PROMPT)] == PROMPT
    assert "3 groups, mean score 0.500, 2 of them with equal scores" in capsys.readouterr().out
    assert (tmp_path / "groups.html").stat().st_size > 1000


async def test_process_that_can_use_no_group_says_why(tmp_path: Path) -> None:
    aborted = answering(["7", "8"], finish_reasons=["abort", "abort"])
    with pytest.raises(NothingProcessed, match=r"none of 2 groups could be used \(2 aborted\)"):
        await act(
            process, aborted, "--group-size=2", "--steps=2", f"--output={tmp_path / 'groups.jsonl'}"
        )
