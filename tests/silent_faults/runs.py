"""Runs the trainer in this process on groups of a producer, and collects what it reports."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from structlog.testing import capture_logs

from grpo_core.errors import GrpoError
from grpo_core.tree.trainer import TrainerSettings
from grpo_core.tree.trainer_command import CommandLine
from grpo_core.tree.weights import served_weights_directory
from grpo_trainer import train
from tests.fixtures.inference import FILE_DTYPE, InferenceServer, start_inference, stop_inference
from tests.inference.trainer_side import next_epoch, write_weights
from tests.negative_controls.grpo_negative_controls import control_plugin
from tests.silent_faults.exercise import TINY, Exercise
from tests.silent_faults.faults import KEPT_KV, LORA, SHARED, Fault
from tests.silent_faults.producer import FAULT_FROM, Producer

WITHIN_STEPS = 10
"""After the first faulty batch."""
KNOWN_WARNINGS = {"weights.inherited", "server.unavailable"}
"""Reports of the start that have nothing to do with faults."""
UNDECIDED = "None of these assumptions explains the difference"
"""Of an error that names every possible cause."""


@dataclass(frozen=True)
class Report:
    """A warning or an error. `step`: number of optimizer steps before it."""

    step: int
    text: str


@dataclass(frozen=True)
class Outcome:
    records: list[dict[str, float]]
    error: GrpoError | None
    reports: list[Report]

    def first(self, words: tuple[str, ...]) -> Report | None:
        """The first report that contains one of the words, and does not merely list all causes."""
        told = [report for report in self.reports if UNDECIDED not in report.text]
        return next((r for r in told if any(word in r.text for word in words)), None)


@dataclass(frozen=True)
class Site:
    """The services of a run, and the trainer's options for them. `restore`: the first weights."""

    server: InferenceServer
    api_url: str
    options: dict[str, Any]
    restore: Callable[[], None]
    exercise: Exercise = TINY

    def settings(self, directory: Path, **changes: Any) -> TrainerSettings:
        values: dict[str, Any] = {
            "model": str(self.server.model),
            "run_api_url": self.api_url,
            "inference_url": self.server.url,
            "steps": FAULT_FROM + WITHIN_STEPS,
            "batch_size": self.exercise.sequences_per_batch // 2,
            "gradient_accumulation_steps": 2,
            "seq_len": 128,
            "lr": self.exercise.lr,
            "batch_deadline_s": 600.0,
            "save_path": directory / "saved",
            "checkpoint_interval": 0,
            "metrics_file": directory / "metrics.jsonl",
        }
        return CommandLine(**values | self.options | changes).settings()


def run_with(
    fault: Fault,
    site: Site,
    directory: Path,
    batches_late: int = 0,
    receipts: bool = True,
    **changes: Any,
) -> Outcome:
    site.restore()
    httpx.get(f"{site.api_url}/reset_data").raise_for_status()
    options: dict[str, Any] = {"change": fault.change, "batches_late": batches_late}
    options |= {"receipts": receipts}
    producer = Producer(site.server, site.api_url, site.exercise, **options | fault.producer)
    with pytest.MonkeyPatch.context() as patch:
        fault.sabotage(patch)
        return run(producer, site.settings(directory, **fault.options | changes))


def run(producer: Producer, settings: TrainerSettings) -> Outcome:
    error = None
    with capture_logs() as logs, producer.running():
        try:
            train.train(settings)
        except GrpoError as named:
            error = named
    path = settings.metrics_file
    assert path is not None
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines]
    reports, step = [], 0
    for entry in logs:
        step += entry["event"] == "step.finished"
        if entry["log_level"] == "warning" and entry["event"] not in KNOWN_WARNINGS:
            reports.append(Report(step, str(entry)))
    if error is not None:
        reports.append(Report(len(records), f"{type(error).__name__}: {error}"))
    return Outcome(records, error, reports)


@contextmanager
def shared_site(server: InferenceServer, api_url: str, exercise: Exercise = TINY) -> Iterator[Site]:
    """A run gets the weights that the server has now, and so does who comes later. The server
    computes at the same time as the trainer, which gets one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = write_weights(server, next_epoch(server))

    def restore() -> None:
        write_weights(server, next_epoch(server), found)

    try:
        yield Site(server, api_url, {"mode": SHARED}, restore, exercise)
    finally:
        restore()
        torch.set_num_threads(threads)


@contextmanager
def lora_site(
    model: Path,
    redis_url: str,
    api_url: str,
    directory: Path,
    exercise: Exercise = TINY,
    dtype: str = FILE_DTYPE,
    keeps_kv: bool = False,
) -> Iterator[Site]:
    """A server of its own, which takes adapters from one --save-path. Args: keeps_kv: it gives
    every adapter one name, so that its prefix cache outlives them"""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    save_path = directory / "saved"
    weights = served_weights_directory(save_path)
    weights.mkdir(parents=True)
    run_id = KEPT_KV if keeps_kv else LORA
    server = start_inference(
        model,
        directory,
        *("--dtype", dtype, "--weights-dir", str(weights)),
        *("--redis-url", redis_url, "--run-id", run_id, "--enable-lora"),
        *exercise.server_flags,
        shares=False,
        environment=control_plugin(KEPT_KV, directory) if keeps_kv else None,
    )
    options = {"mode": LORA, "save_path": save_path, "resume": "never", "redis_url": redis_url}
    options |= {"lr": exercise.adapter_lr}
    try:
        yield Site(server, api_url, options, lambda: None, exercise)
    finally:
        stop_inference(server)
        torch.set_num_threads(threads)
