"""A batch that cannot be trained on is kept in quarantine and skipped without a trace."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from grpo_core.clients.run_api import LeasedBatch
from grpo_core.tree.trainer_command import CommandLine
from grpo_core.wire.policy_version import PolicyVersion
from grpo_core.wire.run_api import EnvironmentCount
from grpo_tiny_model.model import build_model
from grpo_tiny_model.spec import TinySpec
from grpo_trainer.coefficients import Tau, coefficients_of
from grpo_trainer.data.batches import BatchSource, Position
from grpo_trainer.data.collate import MicroBatch
from grpo_trainer.data.filter import NO_HISTORY
from grpo_trainer.data.quarantine import Quarantine
from grpo_trainer.errors import PolicyDiverged, RolloutMismatch
from grpo_trainer.learner import Learner
from grpo_trainer.model.forward import plain_forward
from grpo_trainer.model.logprobs import TokenValues
from grpo_trainer.model.packing import Layout, padded
from grpo_trainer.model.reference import Reference
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.ranks import ALONE
from grpo_trainer.roles import Lead
from grpo_trainer.stop import Stop
from grpo_trainer.telemetry.provenance import ProvenanceLog
from grpo_trainer.telemetry.rollouts import StepRollouts
from grpo_trainer.telemetry.sinks import Recorder, Sinks
from grpo_trainer.telemetry.speed import ModelFlops, Speed
from grpo_trainer.token_table import Distance
from grpo_trainer.train import training_steps
from grpo_trainer.weight_sync.base import Published
from tests.support.directories import names
from tests.unit.trainer.groups import LIMITS, good, in_order

Harm = Callable[[Tensor, Tensor], Tensor]
HARMS: dict[str, Harm] = {
    "loss": lambda logp, _weight: logp * float("nan"),
    "gradient": lambda logp, weight: logp + (0 * weight).sqrt(),  # infinite slope times 0
}
POISON = 2.0
"""The forward pass gives harmful values for sequences with this temperature."""


class Bench:
    """The training loop on a tiny model; run-api, server and saver only record calls."""

    def __init__(
        self, save_path: Path, harm: str = "loss", times: int = 100, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.policy = build_model(LIMITS.vocab_size, TinySpec(layers=1, width=32)).eval()
        self.optimizer = MasterOptimizer(self.policy.parameters(), lambda _: 0.1, 0.0, 1.0)
        self.save_path, self.harm, self.left = save_path, HARMS[harm], times
        self.options = options
        self.reference: Reference | None = None
        self.skipped: list[int] = []
        self.records: list[dict[str, float]] = []
        self.rollouts: list[StepRollouts] = []
        self.recovered: list[bool] = []
        self.mismatch = False

    layout = Layout(padded, in_order)

    def __call__(self, policy: Any, micro: MicroBatch) -> TokenValues:
        """The forward pass."""
        values = plain_forward(policy, micro)
        logp = values.logp
        if self.left and POISON in micro.temperature.tolist():
            self.left -= 1
            logp = self.harm(logp, next(policy.parameters()).flatten()[0])
        return values._replace(logp=logp)

    def publish(self, optimizer: MasterOptimizer, step: int) -> Published:
        optimizer.write_into_parameters()
        return Published(PolicyVersion(1, step), 0.0)

    def before_update(self, *_: object) -> Distance:
        if self.mismatch:
            raise RolloutMismatch("sampled otherwise")
        return Distance(0, 0.0, 0.0, 0.0)

    def train(
        self, batches: Sequence[bool], missing: Sequence[int] = (), waits: int = 0
    ) -> Position:
        """Args:
        batches: for each batch, whether the second of two micro-batches is harmful
        missing: ids of batches that do not arrive
        waits: number of polls without a batch at the begin
        """
        groups = [
            [good(2 * i), good(2 * i + 1, generation_params={"temperature": POISON if bad else 1})]
            for i, bad in enumerate(batches)
        ]
        leased = (
            LeasedBatch(i, g, [None] * 2) for i, g in enumerate(groups, 1) if i not in missing
        )
        answers = chain([EnvironmentCount(registered=1, connected=1)] * waits, leased)
        settings = CommandLine(
            model="m",
            mode="lora_only",
            steps=len(batches),
            save_path=self.save_path,
            seq_len=LIMITS.seq_len,
            tokens_per_micro_batch=2,
            **self.options,
        ).settings()
        api: Any = SimpleNamespace(
            poll=lambda *_: next(answers), request_ahead=lambda *_: None, run_uuid="run"
        )
        sync: Any = SimpleNamespace(
            publish=self.publish, recover_server=lambda: self.recovered.append(True)
        )
        checks: Any = SimpleNamespace(
            before_update=self.before_update, after_update=lambda *_: None, failed=0
        )
        saver: Any = SimpleNamespace(
            seconds=None,
            poll=lambda: None,
            batch_skipped=lambda at: self.skipped.append(at.batch_id),
            is_due=lambda _: False,
            step_taken=lambda _: None,
        )
        source = BatchSource(settings, api, LIMITS, NO_HISTORY, in_order)
        sinks = Sinks([self.records.append], [self.rollouts.append])
        recorder = Recorder(settings, sinks, Speed(ModelFlops(1.0, 1.0, 1.0), 1.0))
        forward: Any = self
        learner = Learner(*(settings, ALONE, self.policy, forward, self.reference, self.optimizer))
        provenance = ProvenanceLog(learner)
        coefficients = coefficients_of(settings)
        lead = Lead(learner, sync, source, checks, recorder, saver, coefficients, provenance)
        position = Position(step=0, batch_id=0, epoch=1)
        steps = training_steps(lead, position, Stop())
        while position.batch_id < len(batches):
            position = next(steps)
        return position

    def masters(self) -> list[list[float]]:
        return [master.flatten().tolist() for master in self.optimizer.masters]


@pytest.mark.parametrize("harm", HARMS)
def test_a_batch_that_fails_twice_is_passed_over_without_a_trace(harm: str, tmp_path: Path) -> None:
    bench, without = Bench(tmp_path, harm), Bench(tmp_path)
    with capture_logs() as logs:
        assert bench.train([False, True, True, False]) == Position(step=2, batch_id=4, epoch=1)
    assert bench.skipped == [2, 3]
    assert [record["data/quarantined_batches"] for record in bench.records] == [0, 2]
    warned = [entry["batch_id"] for entry in logs if entry["event"] == "batch.quarantined"]
    assert warned == [2, 3]
    assert names(tmp_path / "quarantine" / "run") == ["batch_2.json", "batch_3.json"]
    kept = json.loads((tmp_path / "quarantine" / "run" / "batch_2.json").read_text())
    assert kept["groups"][1] == good(3, generation_params={"temperature": POISON}).model_dump()
    assert (kept["batch_id"], kept["step"]) == (2, 1)
    assert "nan" in kept["error"]
    assert bench.left == 100 - 4
    without.train([False, True, True, False], missing=(2, 3))
    assert bench.masters() == without.masters()


def test_a_step_that_fails_once_is_taken_as_if_it_had_not(tmp_path: Path) -> None:
    bench, alone = Bench(tmp_path, times=1), Bench(tmp_path, times=0)
    for one in (bench, alone):
        one.train([False, True])
    assert bench.left == 0
    assert bench.skipped == []
    assert bench.masters() == alone.masters()


def test_a_server_that_stopped_is_waited_for_while_there_is_no_batch(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.train([False], waits=2).step == 1
    assert len(bench.recovered) == 2


def test_three_batches_in_a_row_end_the_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with pytest.raises(PolicyDiverged, match="3 batches in a row"):
        bench.train([False, True, True, False, True, True, True])
    assert bench.skipped == [2, 3, 5, 6]
    again = Bench(tmp_path)  # quarantined batches are not tried
    again.train([False, True, True, False, True, True, True, False])
    assert (again.left, again.skipped) == (100, [2, 3, 5, 6, 7])


def test_a_batch_that_ends_the_run_is_passed_over_by_the_next_start(tmp_path: Path) -> None:
    bench, again = Bench(tmp_path), Bench(tmp_path)
    bench.mismatch = True
    with pytest.raises(RolloutMismatch):
        bench.train([False])
    assert again.train([False, False]) == Position(step=1, batch_id=2, epoch=1)


@pytest.mark.parametrize("place", ["weights", "loss"])
def test_tau_follows_the_entropy_and_the_reference_acts_where_it_is_asked_to(
    place: str, tmp_path: Path
) -> None:
    """Three steps. The weights of the first one are those of the reference's own policy."""
    options = {"maxent_tau": 0.5, "maxent_target_entropy": 0.1, "maxent_tau_lr": 0.5}
    records = []
    for coefficient in (1e-9, 5.0):
        chosen = {**options, "kl_coef": coefficient, "kl_in": place}
        bench = Bench(tmp_path / str(coefficient), objective="maxent", **chosen)
        bench.reference = Reference(deepcopy(bench.policy), plain_forward, is_policy=False)
        bench.train([False] * 3)
        records.append(bench.records)
        tau = Tau(0.5, target=0.1, rate=0.5)
        for step, record in enumerate(bench.records):
            assert record["maxent/tau"] == pytest.approx(tau.value)
            tau.observe(record["maxent/weights_entropy"], step)
    free, held = (record[0]["maxent/weights_entropy"] for record in records)
    if place == "weights":
        assert abs(free - held) > 0.01
    else:
        assert free == pytest.approx(held)


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_a_penalty_acts_and_its_weight_follows_the_divergence(place: str, tmp_path: Path) -> None:
    """Four steps, from the reference's own weights; the target is never reached."""
    runs = []
    for coefficient in (1e-6, 100.0):
        control: dict[str, Any] = {"kl_control": "adaptive", "kl_target": 1e9, "kl_horizon": 1}
        options: dict[str, Any] = {"kl_coef": coefficient, "kl_in": place, **control}
        bench = Bench(tmp_path / str(coefficient), advantage="group_mean", **options)
        bench.reference = Reference(deepcopy(bench.policy), plain_forward, is_policy=False)
        bench.train([False] * 4)
        weights = [record["policy/kl_coef"] / coefficient for record in bench.records]
        assert weights == pytest.approx([0.8**step for step in range(4)])
        runs.append(bench.records)
    free, held = runs
    assert free[0]["policy/reference_kl"] == pytest.approx(0, abs=1e-9)
    if place == "loss":
        assert held[-1]["policy/reference_kl"] < free[-1]["policy/reference_kl"] / 2
    else:
        assert abs(held[0]["train/loss"]) > 10 * abs(free[0]["train/loss"])


def test_another_batch_with_the_id_of_a_quarantined_one_is_trained_on(tmp_path: Path) -> None:
    """The offline trainer samples an iteration again, and its batches get the same ids."""
    quarantine = Quarantine(tmp_path, "offline")
    first, again = [good(0)], [good(1)]
    quarantine.add(1, first, 0, RolloutMismatch("not the policy's"))
    assert quarantine.holds(1, deepcopy(first))
    assert not quarantine.holds(1, again)
    assert not quarantine.holds(2, first)
    quarantine.add(1, again, 0, RolloutMismatch("not the policy's"))
    assert quarantine.holds(1, again)
