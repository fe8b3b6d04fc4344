"""The environment's main loop with scripted servers on real sockets; failures that it survives, and
failures that end it with a named error."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from grpo_core.errors import ServiceUnavailable, WandbUnavailable
from grpo_core.rollouts.files import read_step, steps_in
from grpo_env.evaluation import TrainingEvaluation
from grpo_env.inference.server import NoGenerateRoute
from grpo_env.pacing import MAX_REFUSED_IN_A_ROW, EveryGroupRefused, NoTrainer
from grpo_env.rollout import producer
from grpo_env.rollout.producer import NoPromptFits
from grpo_env.rollout.untrained import KEPT_GROUPS
from grpo_env.tasks import Message, Row, Split
from grpo_env.tasks.curriculum_files import CurriculumState
from grpo_env.worker import GroupLargerThanBatch
from grpo_runs.process.ports import free_port
from tests.support.canned import generate_answer, inference_routes
from tests.support.http_stub import Answer, DropConnection, Route
from tests.support.scraping import scrape
from tests.support.wait import DEADLINE_S, wait_for_async
from tests.unit.env.feeding import CannedTemplate, RunApi, Sevens, feed, right_and_wrong, run

LOST = "groups_lost_total/equal_scores"


async def test_a_run_is_fed_to_its_last_step_and_left_politely() -> None:
    api = RunApi(num_steps=3, polls_before_trainer=1)
    registration = {"max_token_length": 2048, "desired_name": "x", "weight": 2.0}
    registration |= {"group_size": 2, "min_batch_allocation": 0.25}
    options = ("--env.min-batch-allocation=0.25", "--env.weight=2", "--env.wandb-name=x")

    run_api, _ = await run(api, right_and_wrong, *options)

    assert run_api.bodies("POST /register-env") == [registration] * 2
    assert len(api.groups) >= 6
    assert {group["env_id"] for group in api.groups} == {0}
    assert api.groups[0]["scores"] == [1.0, 0.0]
    assert api.disconnected == [0]


async def test_prometheus_reads_what_the_environment_counts() -> None:
    port, failing = free_port(), itertools.cycle([(200, generate_answer(["7", "7"])), None])

    def generate(body: dict[str, Any]) -> Answer:
        return next(failing) or right_and_wrong(body)

    options = (f"--metrics-port={port}", "--curriculum=learnable")
    work = asyncio.create_task(run(RunApi(num_steps=10**6), generate, *options))
    shown: dict[str, float] = {}

    def counts_both() -> bool:
        with contextlib.suppress(OSError):
            shown.update(scrape(port))
        return all(shown.get(f"grpo_environment_{name}") for name in ("groups_sent_total", LOST))

    await wait_for_async(counts_both)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    assert shown["grpo_environment_groups_lost_total/refused"] == 0
    (requests,) = (v for k, v in shown.items() if k.startswith("grpo_environment_server_requests"))
    assert requests >= 2
    (up,) = (v for k, v in shown.items() if k.startswith("grpo_environment_server_up"))
    assert up == 1
    assert shown["grpo_environment_items/medium/sevens"] == 1


async def test_a_restarted_environment_goes_on_with_its_curriculum(tmp_path: Path) -> None:
    options = ("--curriculum=learnable", f"--curriculum-dir={tmp_path}")
    answers = itertools.cycle(
        [(200, generate_answer(["7", "7"])), (200, generate_answer(["7", "8"]))]
    )

    with capture_logs() as logs:
        await run(RunApi(num_steps=2), lambda _body: next(answers), *options)
        first = CurriculumState.model_validate_json((tmp_path / "state.json").read_text())
        await run(RunApi(num_steps=2), right_and_wrong, *options)

    second = CurriculumState.model_validate_json((tmp_path / "state.json").read_text())
    draws = [state.tasks["sevens"].draws for state in (first, second)]
    assert draws[1] > draws[0] >= 8  # half of the first groups were dropped
    [(completions, total, *_)] = first.tasks["sevens"].items.values()
    assert 0.5 < total / completions < 1  # those count too
    assert [line["items"] for line in logs if line["event"] == "curriculum.restored"] == [1]
    pools = [json.loads(line) for line in (tmp_path / "pools.jsonl").read_text().splitlines()]
    assert pools[-1]["curriculum/sevens/medium"] == 1


async def test_total_steps_ends_the_run_earlier_than_the_trainer() -> None:
    api = RunApi(num_steps=1000)

    await run(api, right_and_wrong, "--env.total-steps=1")

    assert 2 <= len(api.groups) < 20


async def test_a_complete_run_that_is_prolonged_later_is_fed() -> None:
    api = RunApi(num_steps=3)
    api.steps_before = 3
    work = asyncio.create_task(run(api, right_and_wrong, f"--env.next-run-deadline-s={DEADLINE_S}"))
    await wait_for_async(lambda: api.status_polls >= 4)
    assert api.groups == []
    api.prolonged_to = 5

    await work

    assert len(api.groups) >= 4
    assert api.disconnected == [0]


@pytest.mark.parametrize(
    ("steps_before", "words", "evaluated", "is_hinted"),
    [(3, [], [], True), (3, ["--env.total-steps=3"], [3], True), (0, [], [3], False)],
)
async def test_an_environment_that_starts_too_late_evaluates_if_it_knows_the_last_step(
    steps_before: int,
    words: list[str],
    evaluated: list[int],
    is_hinted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only such an environment logs how to start a new run."""
    finished: list[int] = []

    async def finish(_self: Any, step: int, _plan: Any) -> None:
        finished.append(step)

    monkeypatch.setattr(TrainingEvaluation, "finish", finish)
    api = RunApi(num_steps=3)
    api.steps_before = steps_before
    with capture_logs() as logs:
        await run(api, right_and_wrong, *words)
    [end] = [line for line in logs if line["event"] == "run.completed"]
    assert ("reset_data" in end.get("hint", "")) is is_hinted
    assert (finished, api.groups == []) == (evaluated, is_hinted)


async def test_the_reward_sample_counts_the_groups_that_were_dropped_or_refused() -> None:
    api = RunApi(num_steps=1)
    routes = api.routes()
    texts = iter([["7", "7"], ["7", "7"], ["8", "7"], ["7", "7"]])
    refusals = iter([(409, {"detail": "no trainer has registered"})])

    def generate(_body: dict[str, Any]) -> Answer:
        return 200, generate_answer(next(texts, ["7", "8"]))

    # The first submitted group, with the answers 8 and 7, is refused.
    routes["POST /scored_data"] = lambda body: next(refusals, None) or api.submit(body)
    await feed(routes, inference_routes(generate), "--env.max-concurrent-groups=1")

    samples = [group["group_overrides"]["reward_sample"] for group in api.groups]
    assert samples[:2] == [
        {"sum": 8.0, "count": 10, "parts": {"accuracy": 8.0}, "groups": 5, "equal_groups": 3},
        {"sum": 1.0, "count": 2, "parts": {"accuracy": 1.0}, "groups": 1, "equal_groups": 0},
    ]


async def test_dropped_groups_are_counted_and_some_are_kept_to_be_read(tmp_path: Path) -> None:
    """Ten groups are dropped before the first is kept, and two after it."""
    api = RunApi(num_steps=1)
    texts = iter([["7", "7"]] * 10 + [["8", "7"]] + [["8", "8"]] * 2)

    def generate(_body: dict[str, Any]) -> Answer:
        return 200, generate_answer(next(texts, ["7", "8"]))

    (tmp_path / "dropped").mkdir()
    (tmp_path / "dropped/step-000009.jsonl.gz").touch()  # the run was resumed before this step
    words = (f"--untrained-dir={tmp_path}", "--env.max-concurrent-groups=1")
    with capture_logs() as logs:
        await feed(api.routes(), inference_routes(generate), *words)

    told = [line for line in logs if line["event"] == "groups.counted"][-1]
    assert told["failures"]["equal_scores"] == 12
    # By its own count: run-api may have the last group before the environment has the answer.
    assert told["dropped_share"] == pytest.approx(12 / (13 + told["groups_sent"]), abs=1e-4)
    assert steps_in(tmp_path / "dropped") == [1]
    kept = [(one.group, one.index, one.score) for one in read_step(tmp_path / "dropped", 1)]
    assert kept[:3] == [(0, 0, 1), (0, 1, 1), (1, 0, 1)]
    assert len(kept) == 2 * KEPT_GROUPS


async def test_an_environment_that_drops_nearly_all_groups_warns_with_their_completions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(producer, "_REPORT_EVERY_S", 0.0)
    texts = itertools.chain([["7", "8"]], itertools.repeat(["7", "7"]))
    with capture_logs() as logs:
        work = asyncio.create_task(run(RunApi(), lambda _body: (200, generate_answer(next(texts)))))
        await wait_for_async(lambda: len(warned(logs)) >= 3)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    dropped = []
    for told in warned(logs):
        assert told["completions"] == 'score 1: "7"; score 1: "7"; score 1: "7"'
        text = r"[01] of 2 groups for this batch, (\d+) dropped; of the newest, 9\d % have equal.*"
        found = re.fullmatch(text, told["for_batch"])
        assert found is not None, told
        dropped.append(int(found[1]))
    assert not any("score 1:" in str(line) for line in logs if line["event"] == "groups.counted")
    assert all(after >= 2 * before for before, after in itertools.pairwise(dropped))


def warned(logs: Sequence[Any]) -> list[Any]:
    return [line for line in logs if line["event"] == "rewards.all_equal"]


async def test_a_group_that_no_batch_can_hold_is_refused_at_the_start() -> None:
    task = Sevens()
    task.max_sequences = 2
    told = r"6 sequences \(--group-size 3, 2 for each rollout\) .* batch of 4 sequences"
    with pytest.raises(GroupLargerThanBatch, match=told):
        await run(RunApi(), right_and_wrong, "--env.group-size=3", task=task)


async def test_as_many_groups_are_sampled_at_once_as_allowed_and_no_more() -> None:
    api, three_at_once = RunApi(num_steps=6), threading.Barrier(3)
    under_way: list[dict[str, Any]] = []
    counts: list[int] = []

    def generate(body: dict[str, Any]) -> Answer:
        under_way.append(body)
        counts.append(len(under_way))
        three_at_once.wait(DEADLINE_S)
        under_way.pop()
        return right_and_wrong(body)

    await run(api, generate, "--env.max-concurrent-groups=3", "--env.max-batches-offpolicy=8")

    assert len(api.groups) >= 12
    assert max(counts) == 3


async def test_sampling_goes_on_while_run_api_holds_a_submission() -> None:
    api, four_more, arrived = RunApi(num_steps=4), threading.Event(), itertools.count(1)
    routes = api.routes()
    waited: list[bool] = []

    def submit(body: dict[str, Any]) -> Answer:
        number = next(arrived)
        if number == 1:
            waited.append(four_more.wait(DEADLINE_S))
        elif number == 5:
            four_more.set()
        return api.submit(body)

    routes["POST /scored_data"] = submit
    options = ("--env.max-concurrent-groups=2", "--env.max-batches-offpolicy=8")
    await feed(routes, inference_routes(right_and_wrong), *options)

    assert waited == [True]


class LongAndShort(Sevens):
    """A data set of prompts with 1 to 100 tokens."""

    def rows(self, split: Split) -> Sequence[Row] | None:
        return [{"prompt": f"{n}"} for n in range(1, 101)] if split == "train" else None


class AsLongAsItsNumber(CannedTemplate):
    def prompt_ids(self, prompt: str | Sequence[Message], _tools: object = ()) -> list[int]:
        assert not isinstance(prompt, str)
        return [5] * int(prompt[0]["content"])


LONG_AND_SHORT: dict[str, Any] = {"task": LongAndShort(), "template": AsLongAsItsNumber()}


async def test_prompts_without_room_for_a_completion_are_never_asked() -> None:
    lengths = []

    def generate(body: dict[str, Any]) -> Answer:
        ids = body["prompt"]["prompt_token_ids"]
        lengths.append(len(ids))
        return 200, generate_answer(["7", "8"], prompt_token_ids=ids)

    with capture_logs() as logs:
        await run(RunApi(num_steps=3), generate, **LONG_AND_SHORT)
    # A completion of 4 tokens and the trainer's limit, below 50, leave 45 tokens for the prompt.
    filtered = [line for line in logs if line["event"] == "prompts.filtered"]
    assert [(line["kept"], line["too_long"]) for line in filtered] == [(100, 0), (45, 55)]
    assert 0 < max(lengths) <= 45


async def test_a_data_set_without_a_prompt_that_fits_ends_the_work() -> None:
    with pytest.raises(NoPromptFits, match=r"sevens: all prompts are too long"):
        await run(RunApi(), right_and_wrong, "--env.max-token-length=5", **LONG_AND_SHORT)


NAMES = {"group": "trainers-group", "project": "trainers-project"}


class Logging(RunApi):
    """Its trainer logs to Weights & Biases."""

    def routes(self) -> dict[str, Route]:
        return super().routes() | {"GET /wandb_info": lambda _body: (200, NAMES)}


async def test_an_environment_logs_under_its_name_to_the_trainers_project_and_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("MODE", "offline"), ("DIR", str(tmp_path)), ("SILENT", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    options = ("--env.use_wandb", "true", "--env.wandb_name", "my-environment")
    await run(Logging(num_steps=2), right_and_wrong, *options)
    (log,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    written = log.read_bytes()
    for word in (*NAMES.values(), "my-environment_0", "env/mean_reward", "env/groups_sent"):
        assert word.encode() in written


async def test_an_environment_leaves_the_run_if_wandb_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_MODE", "no such mode")
    api = Logging(num_steps=2)
    with pytest.raises(WandbUnavailable, match="omit --use-wandb"):
        await run(api, right_and_wrong, "--use-wandb")
    assert api.disconnected == [0]


def failing_twice(route: Route) -> Route:
    """First status 500, which clients do not repeat, then a broken connection, then the route's
    answer."""
    left = iter([500, None])

    def answer(body: dict[str, Any]) -> Answer:
        for failure in left:
            if failure is None:
                raise DropConnection
            return failure, {"detail": "not now"}
        return route(body)

    return answer


@pytest.mark.parametrize(
    "route",
    ["POST /register-env", "GET /info", "GET /status-env", "POST /scored_data", "POST /generate"],
)
async def test_a_server_that_fails_for_a_while_is_survived_wherever_it_fails(route: str) -> None:
    api = RunApi(num_steps=2)
    both = api.routes() | inference_routes(right_and_wrong)
    both[route] = failing_twice(both[route])

    await feed(both, both)

    assert len(api.groups) >= 4
    assert api.disconnected == [0]


async def test_a_queue_that_is_full_for_a_while_loses_no_group() -> None:
    """run-api delays a submission and then requests it again. No other group is sampled for
    that."""
    api = RunApi(num_steps=2)
    routes = api.routes()
    full = iter([(503, {"detail": "the queue has been full"}, {"Retry-After": "0.3"})] * 6)
    routes["POST /scored_data"] = lambda body: next(full, None) or api.submit(body)

    _, inference = await feed(
        routes, inference_routes(right_and_wrong), "--env.max-batches-offpolicy=1"
    )

    assert len(api.groups) >= 4
    # Groups that are being sampled when the last batch is delivered are dropped.
    assert len(inference.bodies("POST /generate")) <= len(api.groups) + 2


async def test_a_queue_that_is_full_for_longer_than_the_deadline_does_not_end_the_environment() -> (
    None
):
    api = RunApi(num_steps=2)
    routes = api.routes()
    full = iter([(503, {"detail": "the queue has been full for 20 s"})] * 40)
    routes["POST /scored_data"] = lambda body: next(full, None) or api.submit(body)

    await feed(routes, inference_routes(right_and_wrong), "--env.run-api-deadline-s=0.2")

    assert next(full, None) is None
    assert len(api.groups) >= 4


async def test_groups_that_a_reset_made_homeless_are_no_reason_to_give_up() -> None:
    api = RunApi(num_steps=10)
    routes = api.routes()
    homeless = iter([(409, {"detail": "no trainer has registered"})] * 2 * MAX_REFUSED_IN_A_ROW)
    routes["POST /scored_data"] = lambda body: next(homeless, None) or api.submit(body)
    await feed(routes, inference_routes(right_and_wrong))

    assert len(api.groups) >= 20


def answering(status: int, detail: str) -> Route:
    return lambda _body: (status, {"detail": detail})


IN_VAIN = {
    "an inference server that stays broken": (
        *("POST /generate", answering(500, "broken"), ["--openai.request-deadline-s=0.6"]),
        *(ServiceUnavailable, r"vllm-server answered no request successfully for [\d.]+ s"),
    ),
    "a server without generate": (
        *("POST /generate", answering(404, "Not Found"), []),
        *(NoGenerateRoute, r"404 Not Found on /generate at http.*\(stock vLLM has no /generate\)"),
    ),
    "an inference server that refuses every request": (
        *("POST /generate", answering(422, "unknown parameter"), []),
        *(EveryGroupRefused, "vllm-server refused.*unknown parameter"),
    ),
    "a run-api that refuses every group": (
        *("POST /scored_data", answering(422, "no"), []),
        *(EveryGroupRefused, "run-api refused.*no"),
    ),
    "a run-api that takes no group and answers all else": (
        *("POST /scored_data", answering(503, "slow"), ["--env.run-api-deadline-s=0.5"]),
        *(ServiceUnavailable, r"run-api answered no request successfully for [\d.]+ s.*slow"),
    ),
}


@pytest.mark.parametrize(
    ("route", "answer", "options", "error", "says"), IN_VAIN.values(), ids=IN_VAIN.keys()
)
async def test_a_service_that_never_works_ends_the_work_with_a_name_and_a_goodbye(
    route: str, answer: Route, options: list[str], error: type[Exception], says: str
) -> None:
    api = RunApi(num_steps=1000)
    both = api.routes() | inference_routes(right_and_wrong) | {route: answer}
    with pytest.raises(error, match=says):
        await feed(both, both, *options)
    assert api.disconnected == [0]


async def test_a_trainer_that_never_comes_ends_the_work() -> None:
    api = RunApi(polls_before_trainer=100)

    with pytest.raises(NoTrainer, match=r"within 0\.3 s"):
        await run(api, right_and_wrong, "--env.trainer-deadline-s=0.3")


async def test_a_trainer_that_takes_no_batch_any_more_ends_the_work() -> None:
    api = RunApi()
    api.takes_batches = False

    with pytest.raises(NoTrainer, match=r"the trainer took no batch for 0\.5 s"):
        await run(api, right_and_wrong, "--env.trainer-deadline-s=0.5")
    assert api.disconnected == [0]
