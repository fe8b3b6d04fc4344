"""Silent training mistakes are detected: each is put into a run and must be named within 6 steps.

The session's server samples the groups, and a real run-api delivers them. A healthy run raises no
error and logs no warning.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from grpo_core.errors import GrpoError
from grpo_core.wire.fields import MASKED
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer import train
from grpo_trainer.config.cli import CommandLine
from grpo_trainer.config.trainer import TrainerSettings
from grpo_trainer.errors import (
    DuplicatedBatch,
    RolloutMismatch,
    ServedWeightsDiffer,
    UnusableGroup,
)
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.verify.causes import Cause
from grpo_trainer.weight_sync.shared_memory.shared_vllm import SharedVllm
from tests.fixtures.inference import FLOAT32_NOISE, InferenceServer
from tests.inference.faulty_producer import GROUP_SIZE, GROUPS_PER_BATCH, Change, Producer
from tests.inference.trainer_side import next_epoch, write_weights

STEPS = 6
LR = 3e-5
"""A step moves the logprobs far beyond noise but stays within the healthy range."""
KNOWN_WARNINGS = {"weights.inherited"}


@dataclass(frozen=True)
class Outcome:
    records: list[dict[str, float]]
    error: GrpoError | None
    warnings: list[str]


def settings(server: InferenceServer, api_url: str, directory: Path, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "model": str(server.model),
        "mode": "shared_vllm",
        "run_api_url": api_url,
        "inference_url": server.url,
        "steps": STEPS,
        "batch_size": GROUP_SIZE * GROUPS_PER_BATCH // 2,
        "gradient_accumulation_steps": 2,
        "seq_len": 128,
        "lr": LR,
        "batch_deadline_s": 120.0,
        "save_path": directory / "saved",
        "checkpoint_interval": 0,
        "metrics_file": directory / "metrics.jsonl",
    }
    return CommandLine(**values | changes).settings()


def run(producer: Producer, config: TrainerSettings) -> Outcome:
    error = None
    with capture_logs() as logs, producer.running():
        try:
            train.train(config)
        except GrpoError as named:
            error = named
    path = config.metrics_file
    assert path is not None
    lines = path.read_text().splitlines() if path.exists() else []
    warnings = [
        str(entry)
        for entry in logs
        if entry["log_level"] != "info" and entry["event"] not in KNOWN_WARNINGS
    ]
    return Outcome([json.loads(line) for line in lines], error, warnings)


@pytest.fixture(scope="module")
def server(shared_server: InferenceServer) -> Iterator[InferenceServer]:
    """The session's server, which keeps its weights. It computes at the same time as the trainer,
    which gets one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = write_weights(shared_server, next_epoch(shared_server))
    yield shared_server
    write_weights(shared_server, next_epoch(shared_server), found)
    torch.set_num_threads(threads)


def changed(group: ScoredGroup, **changes: Any) -> ScoredGroup:
    return ScoredGroup.model_validate(group.model_dump() | changes)


def prompt_length(group: ScoredGroup) -> int:
    return group.masks[0].index(next(mask for mask in group.masks[0] if mask != MASKED))


def late(group: ScoredGroup) -> ScoredGroup:
    """The first sampled token gets a plausible logprob, every other token that of its left
    neighbour."""
    p, rows = prompt_length(group), group.inference_logprobs or []
    return changed(group, inference_logprobs=[[*r[:p], -0.5, *r[p:-1]] for r in rows])


def early(group: ScoredGroup) -> ScoredGroup:
    p, rows = prompt_length(group), group.inference_logprobs or []
    return changed(group, inference_logprobs=[[*r[:p], *r[p + 1 :], -0.5] for r in rows])


def prompt_trained(first: int, value: float) -> Change:
    """Sets all logprobs from position `first` on to `value`."""

    def change(group: ScoredGroup) -> ScoredGroup:
        p, rows = prompt_length(group), group.inference_logprobs or []
        return changed(
            group,
            masks=[[MASKED] * first + tokens[first:] for tokens in group.tokens],
            inference_logprobs=[[*r[:first], *[value] * (p - first), *r[p:]] for r in rows],
        )

    return change


class PrivateCopy(SharedVllm):
    """Trains a copy, so that updates are announced but never reach the server."""

    def load_policy(self, restoring: bool = False) -> Any:
        return copy.deepcopy(super().load_policy(restoring))


def train_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    build = train.build_weight_sync

    def build_copy(config: TrainerSettings) -> Any:
        sync = build(config)
        sync.__class__ = PrivateCopy  # type: ignore[assignment]
        return sync

    monkeypatch.setattr(train, "build_weight_sync", build_copy)


def write_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write only the first update. Server and trainer read the same memory, so they agree."""
    write, written = MasterOptimizer.write_into_parameters, []

    def forgetful(optimizer: MasterOptimizer) -> None:
        if not written:
            write(optimizer)
        written.append(None)

    monkeypatch.setattr(MasterOptimizer, "write_into_parameters", forgetful)


def nothing(_: pytest.MonkeyPatch) -> None:
    """Leave the trainer as it is."""


@dataclass(frozen=True)
class Fault:
    """`producer`, `options`: the differences from a healthy run; `sabotage`: changes the trainer
    itself."""

    error: type[GrpoError]
    says: str
    producer: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    sabotage: Callable[[pytest.MonkeyPatch], None] = nothing


MISMATCH = "LogProb Alignment: MISMATCH!"
FAR = {"lr": 10 * LR}
"""One step moves the probe beyond its tolerance, independent of the sampled tokens."""
FAULTS = {
    "late": Fault(RolloutMismatch, Cause.LOGPROBS_LATE, {"change": late}),
    "early": Fault(RolloutMismatch, Cause.LOGPROBS_EARLY, {"change": early}),
    "half of the prompt": Fault(
        RolloutMismatch, Cause.PROMPT_TRAINED, {"change": prompt_trained(6, -0.5)}
    ),
    "prompt with its placeholders": Fault(
        UnusableGroup,
        "ref_logprobs avg 1.000 (should be negative!)",
        {"change": prompt_trained(0, 1.0), "paced": False},  # no step is taken
    ),
    "temperature": Fault(
        RolloutMismatch, f"Likely cause: {Cause.TEMPERATURE}.", {"temperature": 0.7}
    ),
    "old weights served, noticed by the probe": Fault(
        ServedWeightsDiffer, MISMATCH, options=FAR, sabotage=train_a_copy
    ),
    "old weights served, noticed in completions": Fault(
        RolloutMismatch,
        f"Likely cause: {Cause.STALE_WEIGHTS}.",
        options=FAR | {"verify_every_steps": 0},
        sabotage=train_a_copy,
    ),
    "an update that is not written": Fault(
        ServedWeightsDiffer,
        "differ from the optimizer's result",
        sabotage=write_only_once,
    ),
    "a batch handed out twice": Fault(
        DuplicatedBatch,
        "step 2: all 8 groups of this batch were already in the batch of step 0",
        {"repeats_after": 2},
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(
    name: str,
    server: InferenceServer,
    clean_run_api: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault = FAULTS[name]
    fault.sabotage(monkeypatch)
    config = settings(server, clean_run_api, tmp_path, **fault.options)
    outcome = run(Producer(server, clean_run_api, **fault.producer), config)
    assert type(outcome.error) is fault.error
    assert fault.says in str(outcome.error)
    assert len(outcome.records) < STEPS


@pytest.mark.parametrize("batches_late", [0, pytest.param(2, marks=pytest.mark.full)])
def test_nothing_is_said_of_a_healthy_run(
    batches_late: int, server: InferenceServer, clean_run_api: str, tmp_path: Path
) -> None:
    producer = Producer(server, clean_run_api, batches_late=batches_late)
    outcome = run(producer, settings(server, clean_run_api, tmp_path))
    assert outcome.error is None
    assert outcome.warnings == []
    assert len(outcome.records) == STEPS
    fresh = [r for r in outcome.records if r.get("staleness/mean") == 0]
    assert len(fresh) == (1 if batches_late else STEPS)
    assert max(r["alignment/fresh_diff_abs_mean"] for r in fresh) < FLOAT32_NOISE
