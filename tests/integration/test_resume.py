"""A trainer with a checkpoint joins its own run, or another one, at a real run-api."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from grpo_core.clients.run_api import TrainerClient
from grpo_core.errors import LeasesFull
from grpo_core.tree.trainer import TrainerSettings
from grpo_core.tree.trainer_command import CommandLine
from grpo_trainer import train
from grpo_trainer.checkpoint.parts import StatePart
from grpo_trainer.checkpoint.resume import find_state, rejoin
from grpo_trainer.checkpoint.store import SavedState, StateStore, capture
from grpo_trainer.data.batches import BatchSource, Position, SkippedBatch
from grpo_trainer.data.filter import NO_HISTORY
from grpo_trainer.errors import NoSuchState, StateMismatch, StateOfAnotherRun
from tests.integration.conftest import StartApi
from tests.integration.run_api_calls import ApiClient, bulky
from tests.support.batches import next_batch
from tests.support.small_trainer import Side
from tests.support.wait import DEADLINE_S
from tests.unit.trainer.groups import LIMITS, in_order

STATE = Position(step=2, batch_id=2, epoch=1)


def settings(http: ApiClient, save_path: Path, **changes: Any) -> TrainerSettings:
    fixed = {
        **{"model": "m", "mode": "shared_vllm", "save_path": save_path},
        **{"run_api_url": str(http.base_url), "service_deadline_s": DEADLINE_S},
        **{"batch_size": 4, "gradient_accumulation_steps": 1},
    }
    return CommandLine(**{**fixed, **changes}).settings()


def save(config: TrainerSettings, position: Position = STATE) -> Path:
    """Save a checkpoint of run-api's run, or of an unknown run if run-api has none."""
    side = Side()
    with TrainerClient(config.run_api_url) as client:
        run_uuid = client.status().run_uuid or "lost"
    record = capture(side.model, side.optimizer, config, position, run_uuid, frozen=None)
    tensors = side.optimizer.tensors(list(record.parameters))
    return StateStore(config.save_path).save(record, StatePart.copied(tensors, leads=True))


def found(config: TrainerSettings) -> SavedState:
    saved = find_state(config, StateStore(config.save_path))
    assert saved is not None
    return saved


@pytest.fixture
def trainer(http: ApiClient) -> Iterator[TrainerClient]:
    with TrainerClient(str(http.base_url)) as client:
        yield client


def train_three_batches(http: ApiClient, config: TrainerSettings) -> None:
    """Lease three batches without an acknowledgement, and leave one more in the queue."""
    http.register()
    http.submit(*range(1, 9))
    with TrainerClient(str(http.base_url)) as trainer:
        trainer.register(config.registration(first_step=0))
        assert [next_batch(trainer).id for _ in range(3)] == [1, 2, 3]


def first_batch_without_a_state(config: TrainerSettings) -> int:
    """The first unacknowledged batch."""
    with TrainerClient(config.run_api_url) as another:
        another.register(config.registration(first_step=0))
        return next_batch(another).id


def test_batches_in_the_state_do_not_come_again(
    http: ApiClient, trainer: TrainerClient, tmp_path: Path
) -> None:
    config = settings(http, tmp_path)
    train_three_batches(http, config)
    save(config)
    assert rejoin(trainer, config, found(config)) == STATE
    assert [next_batch(trainer).id for _ in range(2)] == [3, 4]
    assert first_batch_without_a_state(config) == 3


@pytest.mark.parametrize("has_begun", [False, True])
def test_another_run_is_refused_and_learns_nothing(
    http: ApiClient, trainer: TrainerClient, tmp_path: Path, has_begun: bool
) -> None:
    """Also one that has handed out as many batches. Environments would count the steps of the
    checkpoint."""
    config = settings(http, tmp_path)
    train_three_batches(http, config)
    save(config)
    http.get("/reset_data").raise_for_status()
    if has_begun:
        train_three_batches(http, settings(http, tmp_path, seq_len=7))
    told = "has a different run" + ("" if has_begun else r".*\(run-api has no run yet\)")
    with pytest.raises(StateOfAnotherRun, match=told):
        rejoin(trainer, config, found(config))
    assert http.get("/info").json()["max_token_len"] == (7 if has_begun else -1)
    assert not has_begun or first_batch_without_a_state(config) == 1


def test_a_state_that_is_named_goes_on_in_another_run(
    http: ApiClient, trainer: TrainerClient, tmp_path: Path
) -> None:
    """Redis lost its data: the trainer keeps its steps and takes the batches of the new run."""
    directory = save(settings(http, tmp_path))
    config = settings(http, tmp_path / "new", resume=str(directory))
    http.register()
    http.submit(1, 2)
    with capture_logs() as logs:
        assert rejoin(trainer, config, found(config)) == Position(step=2, batch_id=0, epoch=1)
        assert next_batch(trainer).id == 1
    assert [entry["unknown_batch_id"] for entry in logs] == [2]


def test_the_state_that_the_resume_option_names_is_found(http: ApiClient, tmp_path: Path) -> None:
    config = settings(http, tmp_path)
    store = StateStore(tmp_path)
    assert find_state(config, store) is None
    with pytest.raises(NoSuchState, match=r"no trainer_state\.json and contains no checkpoint"):
        found(settings(http, tmp_path, resume=str(tmp_path)))
    older, newer = save(config), save(config, Position(step=4, batch_id=4, epoch=1))
    assert found(config).directory == newer
    assert find_state(settings(http, tmp_path, resume="never"), store) is None
    assert found(settings(http, tmp_path / "x", resume=str(older))).directory == older
    with pytest.raises(StateMismatch, match="is a checkpoint of the model m, but --model is other"):
        found(settings(http, tmp_path, model="other"))


@pytest.mark.parametrize("is_of_this_run", [True, False])
def test_a_run_whose_steps_are_all_taken_ends_before_it_needs_a_server(
    http: ApiClient, tmp_path: Path, is_of_this_run: bool
) -> None:
    config = settings(http, tmp_path, steps=2, inference_url="http://127.0.0.1:1")
    if is_of_this_run:
        train_three_batches(http, config)
    save(config)
    with capture_logs() as logs:
        train.train(config)
    (entry,) = logs
    assert entry["event"] == "run.already_complete"
    assert entry["reason"] == "nothing was trained, because all 2 steps are done"
    assert "raise --steps to continue" in entry["hint"]
    assert not is_of_this_run or first_batch_without_a_state(config) == 3


def test_full_leases_are_acknowledged_by_an_early_save(own_api: StartApi, tmp_path: Path) -> None:
    api = own_api("early-save", further={"--max-leased-bytes": 1024})
    with ApiClient(base_url=api.url) as http, TrainerClient(api.url) as trainer:
        config = settings(http, tmp_path)
        trainer.register(config.registration(first_step=0))
        for marker in range(1, 7):
            http.submit(marker, **bulky(marker))
        source = BatchSource(config, trainer, LIMITS, NO_HISTORY, in_order)
        at = Position(step=0, batch_id=0, epoch=1)
        assert source.look(at) == SkippedBatch(1)
        full = source.look(replace(at, step=1, batch_id=1))
        assert isinstance(full, LeasesFull)
        assert "write a checkpoint and POST" in str(full)
        trainer.acknowledge(1)
        assert source.look(replace(at, step=1, batch_id=1)) == SkippedBatch(2)
