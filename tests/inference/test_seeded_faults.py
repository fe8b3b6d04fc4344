"""Five mistakes that training survives in silence, each found within ten steps.

The groups are really sampled by the session's server and go through a real run-api; one thing is
broken on the way. The control runs break nothing, and nothing may be said.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from structlog.typing import EventDict

from grpo_core.errors import GrpoError
from grpo_core.wire import MASKED, ScoredGroup
from grpo_trainer import loop
from grpo_trainer.errors import (
    DuplicatedBatch,
    RolloutMismatch,
    ServedWeightsDiffer,
    UnusableGroup,
)
from grpo_trainer.optimizer import MasterOptimizer
from grpo_trainer.rollout_causes import Cause
from grpo_trainer.settings import TrainerSettings
from grpo_trainer.weight_sync.shared_vllm import SharedVllm
from tests.fixtures.inference import InferenceServer
from tests.inference.faulty_producer import GROUP_SIZE, GROUPS_PER_BATCH, Fault, Producer, honest

STEPS = 10
LR = 3e-5
"""A step moves the log-probabilities far beyond noise and stays within health."""
KNOWN_WARNINGS = {"an earlier trainer has updated this server; training goes on from its weights"}


@dataclass(frozen=True)
class Outcome:
    records: list[dict[str, float]]
    error: GrpoError | None
    warnings: list[str]


def settings(
    server: InferenceServer, api_url: str, directory: Path, lr: float = LR, **changes: Any
) -> Any:
    return TrainerSettings(
        model_name=str(server.model),
        weight_bridge_mode="shared_vllm",
        atropos_url=api_url,
        vllm_url=server.url,
        training_steps=STEPS,
        batch_size=GROUP_SIZE * GROUPS_PER_BATCH // 2,
        gradient_accumulation_steps=2,
        seq_len=128,
        lr=lr,
        batch_deadline_s=120.0,
        save_path=directory / "saved",
        checkpoint_interval=0,
        metrics_file=directory / "metrics.jsonl",
        **changes,
    )


def run(producer: Producer, config: TrainerSettings) -> Outcome:
    error = None
    with capture_logs() as logs, producer.running():
        try:
            loop.train(config)
        except GrpoError as named:
            error = named
    path = config.metrics_file
    assert path is not None
    lines = path.read_text().splitlines() if path.exists() else []
    warnings = [str(entry) for entry in logs if is_unexpected(entry)]
    return Outcome([json.loads(line) for line in lines], error, warnings)


def is_unexpected(entry: EventDict) -> bool:
    return entry["log_level"] != "info" and entry["event"] not in KNOWN_WARNINGS


@pytest.fixture(scope="module")
def server(
    shared_server: InferenceServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[InferenceServer]:
    """The session's, given back with the weights that it had.

    Server and trainer compute at the same time, so the trainer gets one thread.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config = settings(shared_server, "http://unused", tmp_path_factory.mktemp("unused"))

    def masters() -> tuple[Any, MasterOptimizer]:
        sync = loop.build_weight_sync(config)
        return sync, MasterOptimizer(sync.load_policy().parameters(), 1.0, 0, 0.0, 1.0)

    sync, optimizer = masters()
    found = [master.detach().clone() for master in optimizer.masters]
    sync.close()
    yield shared_server
    sync, optimizer = masters()
    for master, value in zip(optimizer.masters, found, strict=True):
        master.data.copy_(value)
    sync.start(optimizer, step=0)
    sync.close()
    torch.set_num_threads(threads)


def changed(group: ScoredGroup, **changes: Any) -> ScoredGroup:
    return ScoredGroup.model_validate(group.model_dump() | changes)


def prompt_length(group: ScoredGroup) -> int:
    return group.masks[0].index(next(mask for mask in group.masks[0] if mask != MASKED))


def shifted_late(fill: float) -> Fault:
    def fault(group: ScoredGroup) -> ScoredGroup:
        p, rows = prompt_length(group), group.inference_logprobs or []
        return changed(group, inference_logprobs=[[*r[:p], fill, *r[p:-1]] for r in rows])

    return fault


def shifted_early(group: ScoredGroup) -> ScoredGroup:
    p, rows = prompt_length(group), group.inference_logprobs or []
    return changed(group, inference_logprobs=[[*r[:p], *r[p + 1 :], -0.5] for r in rows])


def prompt_trained(first: int, value: float) -> Fault:
    """From position `first` on, with `value` as logprob."""

    def fault(group: ScoredGroup) -> ScoredGroup:
        p, rows = prompt_length(group), group.inference_logprobs or []
        return changed(
            group,
            masks=[[MASKED] * first + tokens[first:] for tokens in group.tokens],
            inference_logprobs=[[*r[:first], *[value] * (p - first), *r[p:]] for r in rows],
        )

    return fault


def unversioned(fault: Fault) -> Fault:
    """As from an environment that knows of no policy versions."""
    return lambda group: fault(changed(group, group_overrides=None))


DATA_FAULTS: dict[str, tuple[Fault, type[GrpoError], str]] = {
    "late, placeholder moved along": (
        shifted_late(1.0),
        UnusableGroup,
        "ref_logprobs avg 1.000 (should be negative!)",
    ),
    "late": (shifted_late(-0.5), RolloutMismatch, Cause.LOGPROBS_LATE),
    "early": (shifted_early, RolloutMismatch, Cause.LOGPROBS_EARLY),
    "late, no versions, later": (
        unversioned(shifted_late(-0.5)),
        RolloutMismatch,
        Cause.LOGPROBS_LATE,
    ),
    "early, no versions, later": (
        unversioned(shifted_early),
        RolloutMismatch,
        Cause.LOGPROBS_EARLY,
    ),
    "prompt with its placeholders": (
        prompt_trained(0, 1.0),
        UnusableGroup,
        "ref_logprobs avg 1.000 (should be negative!)",
    ),
    "prompt with plausible values": (
        prompt_trained(0, -0.5),
        UnusableGroup,
        "the prompt is not masked",
    ),
    "half of the prompt": (prompt_trained(6, -0.5), RolloutMismatch, Cause.PROMPT_TRAINED),
    "half of the prompt, no versions, later": (
        unversioned(prompt_trained(6, -0.5)),
        RolloutMismatch,
        Cause.PROMPT_TRAINED,
    ),
}


@pytest.mark.parametrize("name", DATA_FAULTS)
def test_logprobs_beside_their_tokens_and_trained_prompts(
    name: str, server: InferenceServer, clean_run_api: str, tmp_path: Path
) -> None:
    fault, error, words = DATA_FAULTS[name]
    producer = Producer(server, clean_run_api, fault)
    if "later" in name:  # never fresh, and healthy at first
        producer = replace(producer, batches_late=2, healthy_batches=3)
    outcome = run(producer, settings(server, clean_run_api, tmp_path))
    assert type(outcome.error) is error
    assert words in str(outcome.error)
    assert len(outcome.records) < STEPS


@pytest.mark.parametrize(
    ("says", "fault", "batches_late"),
    [({"temperature": 1.0}, honest, 0), ({}, honest, 0), ({}, unversioned(honest), 1)],
)
def test_another_temperature_than_said(
    says: dict[str, float],
    fault: Fault,
    batches_late: int,
    server: InferenceServer,
    clean_run_api: str,
    tmp_path: Path,
) -> None:
    producer = Producer(
        server, clean_run_api, fault, temperature=0.7, says=says, batches_late=batches_late
    )
    outcome = run(producer, settings(server, clean_run_api, tmp_path))
    assert type(outcome.error) is RolloutMismatch
    assert f"Likely cause: {Cause.TEMPERATURE}." in str(outcome.error)
    assert len(outcome.records) < STEPS


class PrivateCopy(SharedVllm):
    """Trains a copy: every update is announced and none reaches the server."""

    def load_policy(self, restoring: bool = False) -> Any:
        return copy.deepcopy(super().load_policy(restoring))


def private_copy(config: TrainerSettings) -> SharedVllm:
    sync = original_sync(config)
    sync.__class__ = PrivateCopy
    return sync  # type: ignore[return-value]


original_sync = loop.build_weight_sync


@pytest.mark.parametrize("verify_every_steps", [10, 0])
def test_a_server_that_goes_on_serving_the_old_weights(
    verify_every_steps: int,
    server: InferenceServer,
    clean_run_api: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By asking the server, and, where nobody asks, by the fresh completions alone."""
    monkeypatch.setattr(loop, "build_weight_sync", private_copy)
    config = settings(
        server, clean_run_api, tmp_path, lr=10 * LR, verify_every_steps=verify_every_steps
    )  # so that one step moves the probe beyond its tolerance, whatever was sampled
    outcome = run(Producer(server, clean_run_api), config)
    assert type(outcome.error) is (ServedWeightsDiffer if verify_every_steps else RolloutMismatch)
    assert "LogProb Alignment: MISMATCH!" in str(outcome.error)
    if not verify_every_steps:
        assert f"Likely cause: {Cause.STALE_WEIGHTS}." in str(outcome.error)
    assert len(outcome.records) < STEPS


@pytest.mark.parametrize("writes_before", [1, 4])
def test_an_update_that_is_not_written(
    writes_before: int,
    server: InferenceServer,
    clean_run_api: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Server and trainer read the same memory, so they agree on it, however old it is."""
    write, written = MasterOptimizer.write_into_parameters, []

    def forgetful(optimizer: MasterOptimizer) -> None:
        written.append(None)
        if len(written) <= writes_before:
            write(optimizer)

    monkeypatch.setattr(MasterOptimizer, "write_into_parameters", forgetful)
    outcome = run(Producer(server, clean_run_api), settings(server, clean_run_api, tmp_path))
    assert type(outcome.error) is ServedWeightsDiffer
    assert "do not hold what the optimizer computed" in str(outcome.error)
    assert len(outcome.records) < STEPS


def test_a_batch_that_is_handed_out_twice(
    server: InferenceServer, clean_run_api: str, tmp_path: Path
) -> None:
    producer = Producer(server, clean_run_api, repeats_after=3)
    outcome = run(producer, settings(server, clean_run_api, tmp_path))
    assert type(outcome.error) is DuplicatedBatch
    assert "step 3: all 8 groups of this batch were in the batch of step 0" in str(outcome.error)
    assert len(outcome.records) == 3


@pytest.mark.parametrize(
    ("batches_late", "fault"), [(0, honest), (2, honest), (2, unversioned(honest))]
)
def test_nothing_is_said_where_nothing_is_wrong(
    batches_late: int, fault: Fault, server: InferenceServer, clean_run_api: str, tmp_path: Path
) -> None:
    producer = Producer(server, clean_run_api, fault, batches_late=batches_late)
    outcome = run(producer, settings(server, clean_run_api, tmp_path))
    assert outcome.error is None
    assert outcome.warnings == []
    assert len(outcome.records) == STEPS
    fresh = [r for r in outcome.records if r.get("staleness/mean") == 0]
    if fault is honest:
        assert len(fresh) == (1 if batches_late else STEPS)
        assert max(r["alignment/fresh_diff_abs_mean"] for r in fresh) < 1e-4


def test_the_process_ends_with_status_one(
    server: InferenceServer, clean_run_api: str, tmp_path: Path
) -> None:
    flags = [
        *("--model-name", str(server.model), "--weight-bridge-mode", "shared_vllm"),
        *("--atropos-url", clean_run_api, "--vllm-url", server.url, "--seq-len", "128"),
        *("--batch-size", str(GROUP_SIZE * GROUPS_PER_BATCH)),
        *("--gradient-accumulation-steps", "1", "--save-path", str(tmp_path)),
    ]
    with Producer(server, clean_run_api, shifted_early).running():
        done = subprocess.run(
            [sys.executable, "-m", "grpo_trainer", *flags],
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
    assert done.returncode == 1, done.stderr
    assert "RolloutMismatch" in done.stderr
    assert "LogProb Alignment: MISMATCH!" in done.stderr
