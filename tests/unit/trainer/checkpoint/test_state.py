"""The files of checkpoints: complete, verified and bounded in number. `test_resumed_steps.py` and
`test_rules.py` take the steps after a restore."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from grpo_core.tree.weights import LoraOnlySettings
from grpo_trainer.checkpoint.parts import TENSORS
from grpo_trainer.checkpoint.resume import require_fit
from grpo_trainer.checkpoint.store import (
    NEWEST_EPOCH,
    RECORD,
    OpenedEpochs,
    StateStore,
    read_state,
)
from grpo_trainer.data.batches import Position
from grpo_trainer.errors import CheckpointNotSaved, DamagedState, NewerState, StateMismatch
from tests.support.directories import files_of_at_most, names
from tests.support.small_trainer import SETTINGS, Side


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    return StateStore(tmp_path)


def test_every_random_generator_goes_on_where_it_was(store: StateStore) -> None:
    side, other = Side(0), Side(1)
    side.step(0)
    side.save(store, step=1)
    numbers = [side.step(step) for step in (1, 2)]
    other.resume(store.newest())
    assert [other.step(step) for step in (1, 2)] == numbers


@settings(max_examples=25)
@given(st.lists(st.integers(0, 2_000_000), min_size=1, max_size=5))
def test_the_two_states_that_were_saved_last_are_kept(steps: list[int]) -> None:
    """A run that starts again in the same directory saves lower steps."""
    side = Side()
    with tempfile.TemporaryDirectory() as directory:
        store = StateStore(Path(directory))
        for step in steps:
            side.save(store, step)
        saved = [f"{number:06}_step_{step}" for number, step in enumerate(steps, 1)]
        assert names(store.directory) == saved[-2:]
        newest = store.newest()
        assert newest is not None
        assert newest.record.position == Position(steps[-1], batch_id=steps[-1] + 4, epoch=2)


def test_states_of_random_generators_and_epochs_that_are_none_are_named(store: StateStore) -> None:
    path = Side().save(store) / RECORD
    content = json.loads(path.read_text())
    content["rng"]["torch"] = "AAAA"
    path.write_text(json.dumps(content))
    with pytest.raises(DamagedState, match=r"trainer_state.json: rng: "):
        Side().resume(store.newest())
    for text in ("two", f"{2**63}"):
        (store.directory / NEWEST_EPOCH).write_text(text)
        with pytest.raises(DamagedState, match="newest_epoch: expected whole numbers"):
            OpenedEpochs(store.directory.parent).newest()


def test_a_full_disk_is_named_and_leaves_the_previous_state(store: StateStore) -> None:
    side = Side(width=400)
    side.save(store, step=10)
    told = r"000002_step_20 could not be written: .* free disk space"
    with files_of_at_most(2000), pytest.raises(CheckpointNotSaved, match=told):
        side.save(store, step=20)
    assert names(store.directory) == ["000001_step_10"]
    side.resume(store.newest())


def flip_a_bit(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("changes", [{"format": 3}, {"of_a_later_release": 1}])
def test_a_state_of_a_newer_release_is_not_called_damaged(
    changes: dict[str, int], store: StateStore
) -> None:
    directory = Side().save(store)
    record = json.loads((directory / RECORD).read_text())
    (directory / RECORD).write_text(json.dumps(record | changes))
    with pytest.raises(NewerState, match=rf"newer release than .*\({next(iter(changes))} in "):
        read_state(directory)


def change_a_key(path: Path) -> None:
    path.write_text(path.read_text().replace('"optimizer"', '"optimixer"', 1))


@pytest.mark.parametrize(
    ("file", "harm", "told"),
    [
        (RECORD, change_a_key, "optimizer: Field required; optimixer: Extra inputs"),
        (TENSORS, flip_a_bit, f"the content of {TENSORS} has changed"),
        (RECORD, cut_off, RECORD),
    ],
)
def test_a_damaged_state_is_named(
    file: str, harm: Callable[[Path], None], told: str, store: StateStore
) -> None:
    harm(Side().save(store) / file)
    with pytest.raises(DamagedState, match=told):
        Side().resume(store.newest())


def test_every_difference_to_the_model_is_listed(store: StateStore) -> None:
    record = read_state(Side().save(store)).record
    wider = Side(width=5)
    del wider.model.unused
    wider.model.register_parameter("more", nn.Parameter(torch.zeros(1)))
    now = SETTINGS.model_copy(update={"sync": LoraOnlySettings()})
    lora = LoraOnlySettings(lora_alpha=8).lora
    other = record.model_copy(update={"optimizer": "adafactor", "lora": lora})
    with pytest.raises(StateMismatch) as told:
        require_fit(other, wider.model, now, "here")
    assert str(told.value).splitlines()[1:-1] == [
        "  mode: the checkpoint has shared_vllm, this run has lora_only",
        "  optimizer: the checkpoint has adafactor, this run has adamw",
        "  lora alpha: the checkpoint has 8, this run has 32",
        "  more: this parameter is not in the checkpoint",
        "  unused: this parameter is not in the model",
        "  first: shape [4, 3] in the checkpoint, [5, 3] in the model",
        "  second: shape [4, 3] in the checkpoint, [5, 3] in the model",
    ]
