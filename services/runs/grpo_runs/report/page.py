"""Writes `report.html` of a run: its curves, and its rollouts to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_core.errors import GrpoError, ProtocolViolation
from grpo_core.rollouts.files import TOKENIZER, read_steps
from grpo_core.rollouts.page.encode import REWARD, Point
from grpo_core.rollouts.page.token_texts import TokenTexts
from grpo_core.rollouts.page.write import write_page
from grpo_core.settings.sources import read_file
from grpo_runs.report.evaluations import Evaluations
from grpo_runs.report.steps import pool_curves, speed_text
from grpo_runs.report.summary import ends_of, warnings_text
from grpo_runs.run_directory import RunDirectory, options_in
from grpo_runs.watch.logs import ServiceLogs
from grpo_runs.watch.metrics_log import LOSS, MetricsLog


class NothingToReport(GrpoError):
    """A directory contains no metrics and no rollouts."""


def write_report(
    run: RunDirectory,
    output: Path | None = None,
    logs: ServiceLogs | None = None,
    logs_after: int = 0,
) -> Path:
    """Write the page to `output`, by default `report.html` of the run; returns its path. The run
    may still be training. The curves show each step as it was last taken: a step that repeats
    replaces the earlier ones from its number on.

    Args: logs: of the run, if they were read; logs_after: the step after which these begin

    Raises:
        NothingToReport: the run has neither metrics nor rollouts.
        ProtocolViolation: a line of the metrics is no JSON object, or the configuration no YAML.
        ResultsUnusable: a line of the evaluations breaks its contract.
        BrokenRollouts: a file of rollouts, or their tokenizer, cannot be read.
        OSError: the page could not be written.
    """
    log, rollouts = MetricsLog(run.metrics), run.rollouts
    log.read_new()
    if log.broken_lines:
        raise ProtocolViolation(
            f"{run.metrics} line {log.broken_lines[0]}: expected a JSON object with the key step"
        )
    if not log.rows and rollouts is None:
        dropped = " or ".join(map(str, run.untrained_rollouts.values()))
        raise NothingToReport(
            f"{run.path} has no {run.metrics.name} and no rollouts that were trained on; "
            + (f"name {dropped}" if dropped else "it took no step, or is no directory of a run")
        )
    evaluations = Evaluations.read(run.evaluations)
    curves = {
        name: [(step, value) for step, value, _ in points]
        for name, points in log.curves("step", len(log.rows)).items()
        if name != LOSS
    }
    config = config_of(run)
    texts = token_texts(rollouts)
    logs = logs or ServiceLogs(run.logs)
    logs.read_new()
    told = warnings_text(logs.counts)
    warnings = f"Warnings after step {logs_after}" if logs_after else "Warnings"
    path = output or run.report
    write_page(
        path,
        title_of(config),
        () if rollouts is None else read_steps(rollouts),
        curves | evaluations.curves | pool_curves(run.curricula),
        texts,
        facts_of(run, config, curves, evaluations)
        | ({"Training speed": speed} if (speed := speed_text(log.newest)) else {})
        | ({warnings: told} if told else {}),
        intervals=evaluations.intervals,
        special=texts.special if texts else (),
    )
    return path


def token_texts(rollouts: Path | None) -> TokenTexts | None:
    tokenizer = None if rollouts is None else rollouts / TOKENIZER
    return TokenTexts.from_file(tokenizer) if tokenizer and tokenizer.exists() else None


def config_of(run: RunDirectory) -> Mapping[str, Any]:
    """The options of the run by field; empty if they are not known."""
    offline, sft = run.path / "keys.yaml", run.path / "sft.json"
    kinds = {run.config: options_in, offline: _of_keys, sft: dict}
    found: dict[str, Any] = {}
    for path in filter(Path.is_file, kinds):
        try:
            found |= kinds[path](read_file(path)[0])
        except ValueError as error:
            raise ProtocolViolation(str(error)) from None
        except (KeyError, TypeError) as error:
            raise ProtocolViolation(f"{path} is not complete: {error}") from None
    return found


def _of_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    found = {**keys, "model": keys["model"]["train_id"], "task": [keys["data"]["task"]]}
    is_local = keys.get("generation", {}).get("backend") == "local"
    return found | ({"mode": "local"} if is_local else {})


def title_of(config: Mapping[str, Any]) -> str:
    """`GRPO on gsm8k: SmolLM2-135M-Instruct`"""
    model, tasks = _model(config), config.get("task")
    name = f": {Path(model).name}" if model else ""
    if isinstance(tasks, list):
        return f"GRPO on {' and '.join(map(str, tasks))}{name}"
    if {"data", "loss_after"} <= config.keys():
        return f"SFT on {config['data']}{name}"
    return "Training run"


def facts_of(
    run: RunDirectory,
    config: Mapping[str, Any],
    curves: Mapping[str, Sequence[Point]],
    evaluations: Evaluations,
) -> dict[str, str]:
    rewards = [reward for _, reward in curves.get(REWARD, ())]
    found = {
        "Run": run.run_id,
        "Mode": config.get("mode"),
        "Model": _model(config),
        "Seed": config.get("seed", 0) if config else None,
        "Steps": max((step for step, _ in curves.get(REWARD, ())), default=None),
        "Reward": _change(rewards) if rewards else None,
        **{name[0].upper() + name[1:]: value for name, value in evaluations.facts.items()},
    }
    return {name: str(value) for name, value in found.items() if value not in (None, "")}


def _model(config: Mapping[str, Any]) -> str:
    """Empty if it is not known."""
    model = config.get("model", "")
    return "tiny model" if model in (None, "tiny") else str(model)


def _change(rewards: Sequence[float]) -> str:
    """Means of the first and of the last tenth of the steps."""
    tenth, first, last = ends_of(rewards)
    steps = "step" if tenth == 1 else f"{tenth} steps"
    return f"{first:.3f} (first {steps}) → {last:.3f} (last {steps})"
