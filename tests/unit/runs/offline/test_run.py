"""Whole runs in this process: their files, their first step, and how they go on after a kill."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import structlog
import torch
from rich.console import Console
from safetensors.torch import load_file
from structlog.types import Processor

from grpo_env.evaluation import evaluate
from grpo_env.inference.server import NoGenerateRoute
from grpo_env.pacing import RolloutsFail
from grpo_runs.offline import iteration_end, screen
from grpo_runs.offline.data import InProcessQueue, optimizer_batches
from grpo_runs.offline.errors import StaleServer
from grpo_runs.offline.keys import OfflineKeys
from grpo_runs.offline.loop import run_offline
from grpo_runs.offline.results import RunResult, evaluations, result_of, train_records
from grpo_runs.offline.run_files import RunFiles
from grpo_runs.offline.sampling import open_weights
from grpo_runs.offline.screen import OfflineScreen
from grpo_runs.offline.servers import Sampling
from grpo_runs.offline.sweep import Job, read_jobs, write_job
from grpo_runs.offline.translate import trainer_command
from grpo_runs.recipe.main import main
from grpo_trainer.learner import Learner
from grpo_trainer.model.policy import limits_of
from grpo_trainer.stop import Stop
from grpo_trainer.train import open_run, training_steps
from tests.support.http_stub import stub_server
from tests.unit.runs.offline.conftest import MakeKeys

LOCAL = Sampling("local", "local")
PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}


def run(keys: OfflineKeys, directory: Path) -> tuple[RunFiles, str]:
    """The files of a run, and what it printed."""
    printed = io.StringIO()
    console = Console(file=printed, width=200)
    run_offline(keys, directory, OfflineScreen(console, console))
    return RunFiles(directory), printed.getvalue()


WHOLE: dict[str, Any] = {
    "train": {"iterations": 3},
    "eval": {"interval": 2},
    "grpo": {"kl_control": "adaptive", "kl_target": 0.01},
}


@pytest.fixture(scope="module")
def whole(make_keys: MakeKeys, tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    """Three iterations of two optimizer steps with a KL penalty that is controlled."""
    files, _ = run(make_keys(**WHOLE), tmp_path_factory.mktemp("whole") / "run")
    return files


def test_losses_add_up_and_the_penalty_is_its_coefficient_times_the_divergence(
    whole: RunFiles,
) -> None:
    records = train_records(whole)
    assert [record["trained_step"] for record in records] == [2, 4, 6]
    assert [record["served_step"] for record in records] == [0, 2, 4]
    for record in records:
        parts = record["loss_pg"] + record["loss_kl"] + record["loss_entropy"]
        assert record["loss_total"] == pytest.approx(parts, abs=1e-6)
        penalty = record["kl_coef"] * record["kl_divergence"]
        assert record["loss_kl"] == pytest.approx(penalty, abs=1e-6)
        assert record["sequences"] == 16
        assert not record["frozen"]
    assert records[-1]["kl_divergence"] > 0
    assert records[-1]["kl_coef"] != records[0]["kl_coef"]


def test_rewards_are_told_the_step(make_keys: MakeKeys, tmp_path: Path) -> None:
    task = {"task": "tests/unit/runs/offline/rewards.py:by_step"}
    files, _ = run(make_keys(data=task, eval={"interval": 2}), tmp_path / "run")
    for iteration in range(2):
        groups = files.read_groups(iteration) or ()
        parts = [one["reward_parts"] for group in groups for one in group.overrides or ()]
        assert {(part["step"], part["steps"]) for part in parts} == {(2 * iteration, 4)}


def test_a_run_leaves_the_files_that_the_guide_names(whole: RunFiles) -> None:
    names = {str(path.relative_to(whole.path)) for path in whole.path.rglob("*")}
    assert {f"metrics/train_iter_{i:03}.json" for i in range(3)} <= names
    found = evaluations(whole)
    assert [done for done, _ in found] == [0, 2, 3]
    assert result_of(whole).score == found[-1][1][0]["mean@1"]
    assert {f"checkpoints/iter_{i:03}" for i in range(3)} <= names
    saved = load_file(whole.path / "checkpoints/iter_002/model.safetensors")
    final = load_file(whole.model / "model.safetensors")
    assert saved.keys() == final.keys()
    assert all(torch.equal(saved[name], final[name]) for name in saved)
    assert {"report.html", "metrics.png", "keys.yaml"} <= names


def test_records_and_jobs_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    for number in (2, 10, 999, 1000):
        files.write_json(files.train(number), {"reward_mean": number})
        files.write_json(files.evaluation(number), {"mean@1": number})
        write_job(tmp_path / str(number), Job(str(number), {}))
    assert [done for done, _ in evaluations(files)] == [3, 11, 1000, 1001]
    assert result_of(files) == RunResult(1000, 998, 2, 1000)
    assert [job.directory for job in read_jobs(tmp_path)] == ["2", "10", "999", "1000"]


@pytest.mark.parametrize(
    ("module", "place", "calls", "done"),
    [
        (Learner, "accumulate", 3, 1),  # between the two optimizer steps of the second iteration
        # Between its checkpoint and its record, and between its record and its evaluation.
        pytest.param(iteration_end, "iteration_record", 1, 1, marks=pytest.mark.full),
        pytest.param(iteration_end, "evaluate", 1, 2, marks=pytest.mark.full),
    ],
)
def test_a_killed_run_goes_on_to_equal_files(
    whole: RunFiles,
    make_keys: MakeKeys,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    place: str,
    calls: int,
    done: int,
) -> None:
    """Args: calls: of `place` that return before the run ends; done: records that it leaves"""
    made, works = 0, getattr(module, place)

    def dies(*arguments: Any) -> Any:
        nonlocal made
        if made == calls:
            raise KeyboardInterrupt
        made += 1
        return works(*arguments)

    keys = make_keys(**WHOLE)
    shutil.copytree(whole.path / "sampled", tmp_path / "run" / "sampled")
    monkeypatch.setattr(module, place, dies)
    with pytest.raises(KeyboardInterrupt):
        run(keys, tmp_path / "run")
    monkeypatch.undo()
    assert len(train_records(RunFiles(tmp_path / "run"))) == done
    files, said = run(keys, tmp_path / "run")
    assert "of 3 iterations" in said
    assert train_records(files) == train_records(whole)
    assert evaluations(files) == evaluations(whole)
    ours, theirs = (load_file(at.model / "model.safetensors") for at in (files, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_run_that_was_killed_before_its_last_record_gets_it(
    whole: RunFiles, make_keys: MakeKeys, tmp_path: Path
) -> None:
    files = RunFiles(tmp_path / "run")
    shutil.copytree(whole.path, files.path, symlinks=True)
    record = files.train(2).read_text()
    files.train(2).unlink()
    files.evaluation(2).unlink()
    _, said = run(make_keys(**WHOLE), files.path)
    assert files.train(2).read_text() == record
    assert "killed before its last evaluation" in said


def test_rollouts_with_other_line_ends_are_read_back(whole: RunFiles, tmp_path: Path) -> None:
    groups = whole.read_groups(0) or []
    said = [[{"role": "user", "content": "a\u2028b\u0085c"}]] * groups[0].size
    groups[0] = groups[0].model_copy(update={"messages": said})
    RunFiles(tmp_path).write_groups(0, groups)
    assert RunFiles(tmp_path).read_groups(0) == groups


def test_a_finished_run_that_gets_more_iterations_goes_on(
    whole: RunFiles, make_keys: MakeKeys, tmp_path: Path
) -> None:
    shutil.copytree(whole.path, tmp_path / "run", symlinks=True)
    keys = make_keys(train={"iterations": 4}, eval={"enabled": False})
    files, _ = run(keys, tmp_path / "run")
    assert [record["iteration"] for record in train_records(files)] == [0, 1, 2, 3]


def test_other_ranks_wait_for_days_while_rank_0_samples(
    make_keys: MakeKeys, tmp_path: Path
) -> None:
    for given, expected in (({}, 7 * 24 * 3600), ({"rank_deadline_s": 5000.0}, 5000)):
        line = trainer_command(make_keys(grpo=given), LOCAL, tmp_path)
        assert line.rank_deadline_s == expected


@pytest.mark.parametrize("batch_size", [pytest.param(16, marks=pytest.mark.full), 6])
def test_the_first_step_is_that_of_grpo_on_the_same_groups(
    make_keys: MakeKeys, tmp_path: Path, batch_size: int
) -> None:
    """One step of the whole iteration; with a batch of 6, three steps of 5 and 6 sequences whose
    advantages are those of whole groups."""
    train_keys = {"iterations": 1, "batch_size": batch_size}
    keys = make_keys(generation=PLAIN, train=train_keys, eval={"enabled": False})
    files, _ = run(keys, tmp_path / "offline")
    groups = files.read_groups(0)
    assert groups is not None
    (tmp_path / "grpo").mkdir()
    settings = trainer_command(keys, LOCAL, tmp_path / "grpo").settings()
    queue = InProcessQueue()
    with open_run(settings, queue, partial(open_weights, keys, LOCAL)) as opened:
        assert opened is not None
        lead, position = opened
        learner = lead.learner
        limits = limits_of(learner.policy, settings)
        steps = keys.steps_per_iteration
        queue.put(optimizer_batches(groups, steps, settings.resolved_objective, limits))
        assert len([*training_steps(lead, position, Stop())]) == steps
        weights = {name: p.detach().clone() for name, p in learner.policy.named_parameters()}
    trained = load_file(files.model / "model.safetensors")
    for name in trained.keys() & weights.keys():
        torch.testing.assert_close(trained[name], weights[name], rtol=0, atol=1e-6)
    assert len(files.metrics.read_text().splitlines()) == steps


@pytest.mark.usefixtures("unchanged_process")
def test_a_recipe_is_trained_with_its_template_which_the_model_keeps(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = "{% for m in messages %}{{ m['content'] }}!{% endfor %}"
    rows = ["--dataset_name", "tests/unit/runs/offline/rows.jsonl", "--chat_template", template]
    reward = ["--reward_funcs", "tests/unit/runs/offline/rewards.py:length", "--tf32"]
    sizes = ["--max_steps", "1", "--max_completion_length", "4", "--max_prompt_length", "32"]
    where = ["--use_cpu", "--model_name_or_path", model, "--output_dir", str(tmp_path / "run")]

    main("grpo", [*rows, *reward, *sizes, *where])

    assert "without effect: tf32: " in capsys.readouterr().out
    for tokenizer in ("tokenizer", "final_model"):
        assert (tmp_path / "run" / tokenizer / "chat_template.jinja").read_text() == template
    [record] = train_records(RunFiles(tmp_path / "run"))
    assert record["optimizer_steps"] == 1


@pytest.mark.usefixtures("unchanged_process")
def test_warnings_are_counted_at_the_end(
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def configure(_service: str, _level: str, processors: Sequence[Processor]) -> None:
        structlog.configure(processors=[*processors, *before])

    before = structlog.get_config()["processors"]
    monkeypatch.setattr(screen, "configure_logging", configure)
    rows = ["--dataset_name", "tests/unit/runs/offline/rows.jsonl", "--max_prompt_length", "32"]
    reward = ["--reward_funcs", "tests/unit/runs/offline/rewards.py:equal"]
    sizes = ["--max_steps", "3", "--max_completion_length", "4"]
    where = ["--use_cpu", "--model_name_or_path", model, "--output_dir", str(tmp_path / "run")]

    try:
        main("grpo", [*rows, *reward, *sizes, *where])
    finally:
        structlog.configure(processors=before)

    assert "warnings: check.failed (1 time)\n" in capsys.readouterr().out


def test_a_reward_that_fails_ends_the_run_with_its_reason(
    make_keys: MakeKeys, tmp_path: Path
) -> None:
    task = {"task": "tests/unit/runs/offline/rewards.py:failing"}
    keys = make_keys(data=task, eval={"enabled": False})
    with pytest.raises(RolloutsFail, match="no reward for"):
        run(keys, tmp_path)


def test_an_evaluation_on_a_server_that_gets_no_weights_is_caught(
    make_keys: MakeKeys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of eval.base_url that names another server: it samples from other weights."""

    async def of_another_server(*arguments: Any) -> Any:
        result = await evaluate(*arguments)
        return result.model_copy(update={"versions": ((0, 0), (0, 0))})

    monkeypatch.setattr(iteration_end, "evaluate", of_another_server)
    with pytest.raises(StaleServer, match=r"eval\.base_url is a server that gets no new weights"):
        run(make_keys(train={"iterations": 1}), tmp_path)


def test_an_evaluation_may_ask_another_server_than_the_rollouts(
    make_keys: MakeKeys, tmp_path: Path
) -> None:
    """It is asked, and its answer, that it has no such route, ends the run."""
    routes = {"GET /health": lambda _: (200, {}), "POST /generate": lambda _: (404, {})}
    with stub_server(routes) as stub:  # type: ignore[arg-type]
        place = {"backend": "vllm_server", "base_url": stub.url}
        with pytest.raises(NoGenerateRoute):
            run(make_keys(train={"iterations": 1}, eval=place), tmp_path)
        assert stub.bodies("POST /generate")


Evaluated = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def evaluated(make_keys: MakeKeys, tmp_path: Path) -> Evaluated:
    """The items of the evaluation before the training, then those of the one after it."""

    def items(name: str, **options: Any) -> list[dict[str, Any]]:
        keys = make_keys(train={"iterations": 1, "lr": 1e-12}, eval={"replicates": 2} | options)
        files, _ = run(keys, tmp_path / name)
        details = sorted((files.path / "eval").glob("*.json"))
        return [item for path in details for item in json.loads(path.read_text())["items"]]

    return items


def test_evaluations_of_the_same_weights_give_the_same_answers(evaluated: Evaluated) -> None:
    items = evaluated("run")
    assert items[: len(items) // 2] == items[len(items) // 2 :]


@pytest.mark.full
def test_the_seed_of_an_evaluation_decides_its_answers(evaluated: Evaluated) -> None:
    assert evaluated("a") != evaluated("b", seed_base=1)
    shorter = evaluated("c", max_new_tokens=1)
    assert {length for item in shorter for length in item["lengths"]} == {1}
