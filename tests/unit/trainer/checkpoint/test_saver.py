"""Models and checkpoints are saved when due; batches are acknowledged only after a save."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs

from grpo_core.clients.run_api import TrainerClient
from grpo_core.tree.trainer import TrainerSettings
from grpo_core.tree.trainer_command import CommandLine
from grpo_core.weights.directory_checks import FINAL_MODEL
from grpo_tiny_model.model import build_model, build_tokenizer
from grpo_tiny_model.spec import TinySpec
from grpo_trainer.checkpoint.parts import TENSORS
from grpo_trainer.checkpoint.saver import Due, Saver, due_after
from grpo_trainer.checkpoint.store import StateStore
from grpo_trainer.checks.served_weights import Bound
from grpo_trainer.coefficients import Coefficients, KlCoefficient, Tau
from grpo_trainer.data.batches import Position
from grpo_trainer.errors import CheckpointNotSaved
from grpo_trainer.learner import Learner
from grpo_trainer.model.adapter import trained_parameters
from grpo_trainer.model.forward import FastForward
from grpo_trainer.model.policy import train_only
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.ranks import ALONE
from grpo_trainer.weight_sync.shared_memory import release_views
from tests.support.directories import files_of_at_most, names
from tests.support.http_stub import Answer, Route, stub_server

STEPS = 4
START = Position(step=0, batch_id=0, epoch=1)


def settings(**changes: Any) -> TrainerSettings:
    fixed = {"mode": "shared_vllm", "model": "m", "steps": STEPS}
    return CommandLine(**{**fixed, **changes}).settings()


@pytest.mark.parametrize(
    ("step", "saved_step", "intervals", "expected"),
    [
        (1, 0, (3, 10), Due((), False)),
        (3, 0, (3, 10), Due(("step_3",), True)),
        (11, 10, (0, 10), Due((), False)),  # counted from the previous checkpoint,
        (13, 3, (0, 10), Due((), True)),  # whatever its step
        (100, 99, (50, 10), Due(("step_100", FINAL_MODEL), True)),
    ],
)
def test_intervals_and_the_last_step_decide_when_to_save(
    step: int, saved_step: int, intervals: tuple[int, int], expected: Due
) -> None:
    models, states = intervals
    chosen = settings(steps=100, checkpoint_interval=models, state_interval=states)
    assert due_after(step, saved_step, chosen) == expected


@dataclass
class Bench:
    """A saver of a real model, and a run-api that records the files on disk at each
    acknowledgement."""

    saver: Saver
    save_path: Path
    seen: list[tuple[int, list[str]]] = field(default_factory=list)

    def acknowledged(self, batch_id: int, _body: dict[str, Any]) -> Answer:
        self.seen.append((batch_id, on_disk(self.save_path)))
        return 200, {"status": "success", "acknowledged": batch_id, "released": 1}


@contextlib.contextmanager
def bench(directory: Path, **changes: Any) -> Iterator[Bench]:
    save_path = directory / "saved"
    tokenizer, model = build_tokenizer(), build_model(260, TinySpec(layers=1, width=32))
    tokenizer.save_pretrained(directory / "model")
    chosen = settings(model=str(directory / "model"), save_path=save_path, **changes)
    if chosen.trained_layers is not None:
        train_only(model, chosen.trained_layers)
    optimizer = MasterOptimizer(trained_parameters(model).values(), lambda _: 0.1, 0.0, 1.0)
    store = StateStore(save_path)
    routes: dict[str, Route] = {"POST /register": lambda _body: (200, {"uuid": 5, "run_uuid": "r"})}
    with stub_server(routes) as run_api, TrainerClient(run_api.url) as api:
        api.register(chosen.registration(first_step=0))
        penalty = KlCoefficient("adaptive", initial=0.25, target=1.0, horizon=1)
        tau = Tau(initial=0.5, target=1.0)
        tau.observe(1.0, step=0)
        learner = Learner(chosen, ALONE, model, FastForward(), None, optimizer)
        saver = Saver(learner, api, store, Bound(1.0), Coefficients(penalty, tau))
        rig = Bench(saver, save_path)
        for batch_id in range(1, STEPS + 1):
            routes[f"POST /batch/{batch_id}/ack?trainer=5"] = partial(rig.acknowledged, batch_id)
        yield rig


def on_disk(save_path: Path) -> list[str]:
    models = [name for name in names(save_path) if name != "trainer_state"]
    return models + names(save_path / "trainer_state")


def take_steps(saver: Saver, steps: int) -> list[bool]:
    """Begin a run, with steps that take longer than a save; returns for each step whether anything
    was saved."""
    saver.begin(START, is_saved=False)
    saved = []
    for step in range(1, steps + 1):
        saver.step_taken(Position(step=step, batch_id=step, epoch=1))
        saved.append(saver.seconds is not None)
        wait_for_thread(saver)
        saver.poll()
    return saved


def wait_for_thread(saver: Saver) -> None:
    if (pending := saver._writer._pending) is not None:
        wait([pending])


def test_a_stop_while_the_server_is_away_saves_the_checksum_of_its_frozen_weights(
    tmp_path: Path,
) -> None:
    with bench(tmp_path, train_layer_indices="0") as rig:
        take_steps(rig.saver, 1)
        release_views(rig.saver.learner.policy)
        rig.saver.stop()
        began, stopped = (saved.record for saved in rig.saver.store.all())
        assert (began.step, stopped.step) == (0, 1)
        assert stopped.frozen == began.frozen != 0


def test_batches_are_acknowledged_once_a_state_and_its_models_are_saved(tmp_path: Path) -> None:
    with bench(tmp_path, checkpoint_interval=3, state_interval=2) as rig:
        assert take_steps(rig.saver, STEPS) == [False, True, True, True]
        assert rig.seen == [
            (2, ["000001_step_0", "000002_step_2"]),
            (3, ["step_3", "000002_step_2", "000003_step_3"]),
            (4, [FINAL_MODEL, "step_3", "000003_step_3", "000004_step_4"]),
        ]
        assert (rig.save_path / "step_3" / "model.safetensors").exists()
        newest = rig.saver.store.newest()
        assert newest is not None
        assert newest.record.kl_coef == rig.saver.coefficients.kl.value == 0.25
        assert newest.record.maxent == rig.saver.coefficients.tau.to_save == (0.5, 1.0)


def test_training_goes_on_while_a_state_is_written_and_its_batches_wait(tmp_path: Path) -> None:
    """The state is that of the step, whatever the weights are meanwhile. The next one comes
    after it."""
    may_write = threading.Event()
    with (
        bench(tmp_path, checkpoint_interval=0, state_interval=1) as rig,
        contextlib.closing(SimpleNamespace(close=may_write.set)),
    ):
        saver, masters = rig.saver, rig.saver.learner.optimizer.masters
        saver.begin(START, is_saved=False)
        saved, save = [masters[0].clone()], saver.store.save

        def waiting_save(*given: Any) -> Path:
            may_write.wait()
            return save(*given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(saver.store, "save", waiting_save)
            saver.step_taken(Position(step=1, batch_id=1, epoch=1))
        masters[0].add_(1.0)
        saver.poll()
        assert (rig.seen, on_disk(rig.save_path)) == ([], ["000001_step_0"])
        may_write.set()
        saver.step_taken(Position(step=2, batch_id=2, epoch=1))
        assert rig.seen == [(1, ["000001_step_0", "000002_step_1"])]
        assert saver.release_batches()
        assert rig.seen[1:] == [(2, ["000002_step_1", "000003_step_2"])]
        first = f"master/{next(iter(trained_parameters(saver.learner.policy)))}"
        found = [load_file(one.directory / TENSORS)[first] for one in saver.store.all()]
        assert torch.equal(found[0], saved[0])
        assert torch.equal(found[1], masters[0])


def test_a_state_that_could_not_be_written_ends_the_run_and_acknowledges_nothing(
    tmp_path: Path,
) -> None:
    with bench(tmp_path, checkpoint_interval=0, state_interval=1) as rig:
        rig.saver.begin(START, is_saved=False)
        with files_of_at_most(2000):
            rig.saver.step_taken(Position(step=1, batch_id=1, epoch=1))
            wait_for_thread(rig.saver)
        with pytest.raises(CheckpointNotSaved, match="000002_step_1 could not be written"):
            rig.saver.poll()
        assert (rig.seen, on_disk(rig.save_path)) == ([], ["000001_step_0"])


def test_a_resumed_run_saves_no_state_twice(tmp_path: Path) -> None:
    with bench(tmp_path, checkpoint_interval=0, state_interval=10) as rig:
        rig.saver.begin(Position(step=1, batch_id=1, epoch=2), is_saved=True)
        assert not rig.save_path.exists()
        assert not rig.saver.release_batches()
        rig.saver.step_taken(Position(step=2, batch_id=2, epoch=2))
        assert rig.saver.release_batches()
        assert rig.seen == [(2, ["000001_step_2"])]
        assert not rig.saver.release_batches()


def test_a_stop_saves_what_the_newest_state_lacks_and_acknowledges_nothing(tmp_path: Path) -> None:
    with bench(tmp_path, checkpoint_interval=0, state_interval=10) as rig:
        take_steps(rig.saver, 2)
        rig.saver.stop()
        assert on_disk(rig.save_path) == ["000001_step_0", "000002_step_2"]
        rig.saver.stop()
        assert on_disk(rig.save_path) == ["000001_step_0", "000002_step_2"]
        assert rig.seen == []


def test_a_batch_without_a_step_is_acknowledged_with_the_next_state(tmp_path: Path) -> None:
    with bench(tmp_path, checkpoint_interval=0, state_interval=10) as rig:
        rig.saver.begin(START, is_saved=False)
        rig.saver.batch_skipped(Position(step=0, batch_id=2, epoch=1))
        assert rig.seen == []
        assert rig.saver.release_batches()
        assert rig.seen == [(2, ["000001_step_0", "000002_step_0"])]


def test_the_newest_two_models_are_kept_and_their_size_is_told_at_the_start(
    tmp_path: Path,
) -> None:
    with bench(tmp_path, checkpoint_interval=1) as rig, capture_logs() as logs:
        take_steps(rig.saver, STEPS)
        assert names(rig.save_path) == [FINAL_MODEL, "step_3", "step_4", "trainer_state"]
        model_bytes = (rig.save_path / FINAL_MODEL / "model.safetensors").stat().st_size
    (told,) = (event for event in logs if event["event"] == "disk_usage.planned")
    assert (told["models"], told["checkpoints"]) == (4, 3)  # one of each is being written
    assert told["megabytes_per_model"] == pytest.approx(model_bytes / 1e6, rel=0.1)
    assert told["total_megabytes"] == pytest.approx((4 + 3 * 3) * model_bytes / 1e6, rel=0.1)


def test_layers_that_are_not_trained_count_in_planned_models(tmp_path: Path) -> None:
    with capture_logs() as logs, bench(tmp_path, train_layer_indices="0") as rig:
        take_steps(rig.saver, 1)
        model_bytes = sum(parameter.nbytes for parameter in rig.saver.learner.policy.parameters())
    (told,) = (event for event in logs if event["event"] == "disk_usage.planned")
    assert told["megabytes_per_model"] == pytest.approx(model_bytes / 1e6, abs=1e-3)


def test_models_that_the_run_did_not_write_are_no_business_of_it(tmp_path: Path) -> None:
    with bench(tmp_path, checkpoint_interval=1, keep_checkpoints=1) as rig:
        for own_or_not in ("step_0", "step_1", "step_30"):
            (rig.save_path / own_or_not).mkdir(parents=True)
        at = Position(step=2, batch_id=2, epoch=2)
        rig.saver.begin(at, is_saved=True, checkpoints=["step_0", "step_1"])
        rig.saver.step_taken(Position(step=3, batch_id=3, epoch=2))
        wait_for_thread(rig.saver)
        assert names(rig.save_path) == ["step_3", "step_30", "trainer_state"]
        (state,) = (rig.save_path / "trainer_state").glob("*/trainer_state.json")
        assert json.loads(state.read_text())["checkpoints"] == ["step_3"]
