"""The whole loop on two real processes: full leases, a rejected batch, checkpoints, a resume."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from grpo_core.clients.run_api import LeasedBatch
from grpo_core.errors import LeasesFull
from grpo_core.provenance.chain import Provenance
from grpo_core.provenance.verify import verify
from grpo_core.rollouts.files import ROLLOUTS, steps_in
from grpo_core.tree.trainer import TrainerSettings
from grpo_core.tree.trainer_command import CommandLine
from grpo_core.wire.run_api import RunStatus
from grpo_runs.offline.local import WeightsInProcess
from grpo_runs.replay.command import replay_run
from grpo_runs.settings.replay import ReplaySettings
from grpo_trainer.optim.digests import WeightDigests
from grpo_trainer.ranks import ALONE, Ranks
from grpo_trainer.stop import Stop
from grpo_trainer.train import open_run, training_steps
from tests.support.forked import forked
from tests.unit.trainer.groups import good, taught
from tests.unit.trainer.ranks.rank_rig import met
from tests.unit.trainer.tiny_policy import model_directory

DEADLINE_S = 1200.0
METRICS = "metrics.jsonl"
REJECTED = 2
CASES: dict[str, dict[str, Any]] = {
    "penalty": {"kl_coef": 0.1, "kl_in": "reward", "tokens_per_micro_batch": None},
    "maxent": {"objective": "maxent", "kl_coef": 0.1, "maxent_tau": 0.5},
    "fsdp": {"fsdp": True, "kl_coef": 0.1, "kl_in": "reward", "distill_coef": 0.5},
}


class Queue:
    """Hands out equal batches; the second one is not finite, and before some the leases are full
    once. Their groups have a teacher's logprobs."""

    base_url, run_uuid = "here", "run"

    def __init__(self, full_before: Sequence[int] = (3,)) -> None:
        self.given, self.acknowledged, self.full_before = 0, 0, {*full_before}

    def status(self) -> RunStatus:
        return RunStatus(current_step=self.given, queue_size=0, run_uuid=self.run_uuid)

    def register(self, _: object) -> int:
        return 0

    def resume_after(self, batch_id: int) -> None:
        self.given = batch_id

    def request_ahead(self, *_: object) -> None: ...

    def acknowledge(self, batch_id: int) -> None:
        self.acknowledged = batch_id

    def poll(self, *_: object) -> LeasedBatch:
        if self.given + 1 in self.full_before:
            self.full_before.remove(self.given + 1)
            raise LeasesFull("full", 409)
        self.given += 1
        sent = {"advantages": [[3e38], [3e38]]} if self.given == REJECTED else {}
        groups = [
            taught(
                good(10 * self.given + i, env_id=0, tokens=[[i, 6, 7], [i, 6, 8, 9, 10]], **sent)
            )
            for i in range(11, 15)
        ]
        return LeasedBatch(self.given, groups, [None] * 4)


def settings_of(
    model: Path, save_path: Path, steps: int, options: dict[str, Any]
) -> TrainerSettings:
    fixed = {"mode": "none", "redis_url": "redis://127.0.0.1:1/0", "lr": 1e-3, "seq_len": 64}
    sizes = {"steps": steps, "tokens_per_micro_batch": 16, "state_interval": 2, "world_size": 2}
    given = {"model": str(model), "save_path": str(save_path), "dtype": "float32", "device": "cpu"}
    given["metrics_file"] = str(save_path / METRICS)
    other = {"checkpoint_interval": 0, "rank_deadline_s": 1e4}
    return CommandLine.model_validate({**fixed, **sizes, **given, **other, **options}).settings()


@contextlib.contextmanager
def digests(*, every_step: bool) -> Iterator[None]:
    """Args: every_step: as on a CPU, not as on a GPU"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightDigests, "every_step", every_step)
        yield


def train_parts(model: Path, saved: Path, options: dict[str, Any], ranks: Ranks = ALONE) -> None:
    """Three steps, then a resumed run up to the sixth, then a start of the complete run. As on a
    GPU, digests of the resumed run are of its checkpoints alone, after the steps 4 and 6."""

    @contextlib.contextmanager
    def weights(settings: TrainerSettings) -> Iterator[WeightsInProcess]:
        yield WeightsInProcess(settings, samples=True)

    queue: Any = Queue(full_before=(3, 6))
    for steps in (3, 6, 6):
        settings = settings_of(model, saved, steps, options)
        with digests(every_step=steps == 3), open_run(settings, queue, weights, ranks) as opened:
            assert (opened is None) == (saved / f"ended-{steps}-{ranks.index}").exists()
            if opened is not None:
                assert [position.step for position in training_steps(*opened, Stop())][-1] == steps
        (saved / f"ended-{steps}-{ranks.index}").touch()
    assert not ranks.leads or (queue.full_before, queue.acknowledged) == (set(), queue.given)


def test_the_files_of_a_step_are_written_while_the_next_one_is_computed(tmp_path: Path) -> None:
    @contextlib.contextmanager
    def weights(settings: TrainerSettings) -> Iterator[WeightsInProcess]:
        yield WeightsInProcess(settings, samples=True)

    def published() -> list[int]:
        return [one.version.step for one in Provenance.of(run).publications]

    run, queue = tmp_path / "run", Queue(full_before=())
    settings = settings_of(model_directory(tmp_path / "model"), run, 4, {"state_interval": 0})
    with open_run(settings, cast(Any, queue), weights) as opened:
        assert opened is not None
        steps = training_steps(*opened, Stop())
        assert next(steps).step == 1
        assert (published(), steps_in(run / ROLLOUTS)) == ([0], [])
        assert next(steps).step == 2
        assert published() == [0, 1]
    assert published() == [0, 1, 2]
    assert [*steps_in(run / ROLLOUTS)] == [1, 2]


def _work(rank: int, model: Path, saved: Path, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    meeting = (saved / "meeting").as_uri()
    train_parts(model, saved, options, met(rank, meeting))
    os._exit(0)


def idle_fractions(saved: Path) -> list[Any]:
    """Of each step."""
    lines = (saved / METRICS).read_text().splitlines()
    return [json.loads(line).get("train/rank_idle_fraction") for line in lines]


@pytest.mark.parametrize(
    "name",
    ["fsdp", *(pytest.param(name, marks=pytest.mark.full) for name in ("penalty", "maxent"))],
)
def test_two_ranks_train_the_model_of_one(name: str, tmp_path: Path) -> None:
    model = model_directory(tmp_path / "model")
    for place in ("alone", "together"):
        (tmp_path / place).mkdir()
    train_parts(model, tmp_path / "alone", CASES[name])
    processes = [
        forked().Process(target=_work, args=(rank, model, tmp_path / "together", CASES[name]))
        for rank in (0, 1)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE_S)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
    alone, together = (
        load_file(tmp_path / place / "final_model" / "model.safetensors")
        for place in ("alone", "together")
    )
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    idle_alone, idle = (idle_fractions(tmp_path / place) for place in ("alone", "together"))
    assert idle_alone == [None] * 6
    assert len(idle) == 6
    assert max(idle) < 0.1
    found = verify(Provenance.of(tmp_path / "together"))
    assert (found.problems, found.checkpoints, found.undigested) == ([], 2, 1)
    said: list[str] = []
    last = ReplaySettings(run=tmp_path / "together", step=6)
    assert replay_run(Provenance.of(tmp_path / "together"), last, said.append), said
