"""`grpo-report`: what it reads of a run, where it writes, and its failures."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import pytest

from grpo_core.settings import load_settings
from grpo_runs.commands.rollouts import report
from grpo_runs.report.evaluations import Evaluations
from grpo_runs.report.page import config_of, title_of
from grpo_runs.run_directory import RunDirectory
from grpo_runs.settings.rollouts import ReportSettings
from tests.unit.core.rollouts.test_page import data_of
from tests.unit.runs.records import evaluation, metrics_line
from tests.unit.runs.stand_ins import Shown


def reported(*words: object) -> tuple[int, Shown]:
    screen = Shown()
    return report(load_settings(ReportSettings, [*map(str, words)]), screen), screen


def test_the_page_is_written_into_the_run_or_to_a_path(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other.html"
    run.mkdir()
    (run / "metrics.jsonl").write_text(metrics_line(1))
    status, screen = reported(run)
    assert status == 0
    assert f"report: {run / 'report.html'}\n" in screen.out
    assert reported(run, "--output", other)[0] == 0
    assert other.read_text() == (run / "report.html").read_text()


@pytest.mark.parametrize(
    ("file", "content", "title"),
    [
        ("config.yaml", "task: [sums, tools]\nmode: lora_only\n", "GRPO on sums and tools"),
        (
            "config.yaml",
            "task: {name: [sums], held-out: 0.2}\nmodel: {name: org/small}\n",
            "GRPO on sums: small",
        ),
        (
            "keys.yaml",
            "model: {train_id: /models/small}\ndata: {task: sums}\nseed: 1\n",
            "GRPO on sums: small",
        ),
        (
            "sft.json",
            '{"model": "small", "data": "answers.jsonl", "loss_after": 0.1}',
            "SFT on answers.jsonl: small",
        ),
        ("sft.json", '{"loss_after": 0.1}', "Training run"),
    ],
)
def test_the_page_is_titled_by_what_was_trained(
    tmp_path: Path, file: str, content: str, title: str
) -> None:
    (tmp_path / "metrics.jsonl").write_text(metrics_line(1))
    (tmp_path / file).write_text(content)
    assert reported(tmp_path)[0] == 0
    assert f"<title>{title}</title>" in (tmp_path / "report.html").read_text()


def test_an_offline_run_that_samples_by_itself_has_the_mode_local(tmp_path: Path) -> None:
    """Its trainer wrote the options it got, with the mode none."""
    run = RunDirectory(tmp_path)
    run.config.write_text("mode: none\nsteps: 6\n")
    content = "generation: {backend: local}\nmodel: {train_id: m}\ndata: {task: sums}\n"
    (tmp_path / "keys.yaml").write_text(content)
    config = config_of(run)
    assert (config["mode"], config["steps"], title_of(config)) == ("local", 6, "GRPO on sums: m")


def test_the_curves_end_with_the_step_that_was_taken_again(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(map(metrics_line, (1, 2, 3, 2))))
    assert reported(tmp_path)[0] == 0
    curves = data_of(tmp_path / "report.html")["content"]["curves"]
    assert {tuple(step for step, _ in one["points"]) for one in curves} == {(1, 2)}


def test_open_shows_the_page_in_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_text(metrics_line(1))
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or len(opened) == 1)
    assert reported(tmp_path, "--open")[0] == 0
    assert opened == [(tmp_path / "report.html").as_uri()]
    status, screen = reported(tmp_path, "--open")
    assert (status, "failed (NoBrowser): no browser was found; open" in screen.err) == (1, True)


RUN = {"metrics.jsonl": metrics_line(1)}
BROKEN = {"rollouts/step-000001.jsonl.gz": "?"}


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "has no metrics.jsonl and no rollouts that were trained on; it took no step, or"),
        ({"untrained/gsm8k/dropped/x": ""}, "trained on; name {run}/untrained/gsm8k/dropped\n"),
        ({"metrics.jsonl": "[]\n"}, "ProtocolViolation): {run}/metrics.jsonl line 1: expected"),
        (
            RUN | {"eval.jsonl": "{}\n"},
            "ResultsUnusable): {run}/eval.jsonl line 1 is no evaluation: task",
        ),
        (BROKEN, "BrokenRollouts): {run}/rollouts/step-000001.jsonl.gz, "),
        (
            BROKEN | {"rollouts/tokenizer.json": "{}"},
            "BrokenRollouts): {run}/rollouts/tokenizer.json cannot be read as a tokenizer",
        ),
        (RUN | {"run-id": " "}, "RunDirectoryUnusable): {run}/run-id cannot be read: it is empty"),
        (
            {"rollouts/step-000001.jsonl.gz": ""},
            "BrokenRollouts): {run}/rollouts/step-000001.jsonl.gz, line 1: the file is empty",
        ),
        (RUN | {"keys.yaml": "seed: 1"}, "ProtocolViolation): {run}/keys.yaml is not complete"),
        (RUN | {"config.yaml": "a: ["}, "ProtocolViolation): {run}/config.yaml is not YAML"),
    ],
)
def test_a_failure_names_the_file(tmp_path: Path, files: dict[str, str], problem: str) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    status, screen = reported(tmp_path)
    assert status == 1
    assert problem.format(run=tmp_path) in screen.err
    assert not (tmp_path / "report.html").exists()


def test_evaluations_give_curves_and_the_change() -> None:
    """In order of steps. One without a step is of another model."""
    found = Evaluations([evaluation(8, 0.75), evaluation(None, 0.5), evaluation(0, 0.25)])
    assert found.curves == {"eval/sums/pass@1": [(0, 0.25), (8, 0.75)]}
    assert found.intervals == {"eval/sums/pass@1": [(0, 0.125, 0.375), (8, 0.625, 0.875)]}
    assert found.facts == {"pass@1 on sums": "0.25 (0.12 to 0.38) → 0.75 (0.62 to 0.88)"}


def test_evaluations_at_several_temperatures_are_kept_apart() -> None:
    found = Evaluations([evaluation(0, 0.25), evaluation(0, 0.5, temperature=0.7, intervals={})])
    assert found.facts == {
        "pass@1 on sums greedy": "0.25 (0.12 to 0.38)",
        "pass@1 on sums at 0.7": "0.50",
    }
