"""A state holds everything: what is trained after it is the same to the last bit."""

from __future__ import annotations

import json
import random
from hashlib import sha256
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from grpo_trainer.errors import CheckpointNotSaved, DamagedState, StateMismatch
from grpo_trainer.optimizer import MasterOptimizer
from grpo_trainer.settings import TrainerSettings
from grpo_trainer.state_store import RECORD, TENSORS, SavedState, StateStore, read_state
from grpo_trainer.trainer_state import Position, capture, require_fit, restore
from tests.unit.trainer.test_save_path import files_of_at_most, names

SETTINGS = TrainerSettings(model_name="m", weight_bridge_mode="shared_vllm")


class Side:
    """A model in bf16 whose third tensor never gets a gradient, and its optimizer."""

    def __init__(self, seed: int = 0, width: int = 4) -> None:
        torch.manual_seed(seed)
        self.model = nn.Module()
        for name in ("first", "second", "unused"):
            weights = torch.randn(width, 3).to(torch.bfloat16)
            self.model.register_parameter(name, nn.Parameter(weights))
        self.optimizer = MasterOptimizer(self.model.parameters(), 0.1, 4, 0.01, max_grad_norm=1.0)

    def step(self, step: int) -> float:
        """On noise, as a loss with dropout would be."""
        first, second = (self.model.get_parameter(name) for name in ("first", "second"))
        loss = (torch.randn(4, 3) * first + second**2).float().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = self.optimizer.step(step)
        self.optimizer.write_into_parameters()
        return norm + random.random() + float(numpy.random.standard_normal())

    def take_up(self, saved: SavedState | None) -> None:
        """With the write that follows: of the masters into the parameters."""
        assert saved is not None
        require_fit(saved.record, self.model, SETTINGS, "here")
        restore(saved.load(), self.model, self.optimizer)
        self.optimizer.write_into_parameters()

    def save(self, store: StateStore, step: int = 3) -> Path:
        position = Position(step=step, batch_id=step + 4, epoch=2)
        return store.save(capture(self.model, self.optimizer, SETTINGS, position))


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    return StateStore(tmp_path)


def test_what_follows_a_state_is_the_same_to_the_last_bit(store: StateStore) -> None:
    side = Side()
    for step in range(3):
        side.step(step)
    side.save(store)
    expected = [side.step(step) for step in range(3, 8)]

    other = Side(seed=1)
    saved = store.newest()
    assert saved is not None
    assert saved.record.position == Position(step=3, batch_id=7, epoch=2)
    other.take_up(saved)
    assert [other.step(step) for step in range(3, 8)] == expected
    for mine, theirs in zip(other.optimizer.masters, side.optimizer.masters, strict=True):
        assert torch.equal(mine, theirs)


def test_a_state_before_the_first_step_is_one_too(store: StateStore) -> None:
    side = Side()
    side.save(store, step=0)
    expected = side.step(0)
    other = Side(seed=1)
    other.take_up(store.newest())
    assert other.step(0) == expected


def test_the_newest_two_are_kept_by_the_order_they_were_saved_in(store: StateStore) -> None:
    """A run that begins anew where another one saved has lower steps and later states."""
    side = Side()
    for step in (90, 100, 5):
        side.save(store, step)
    assert names(store.directory) == ["000002_step_100", "000003_step_5"]
    newest = store.newest()
    assert newest is not None
    assert newest.record.step == 5


def test_a_state_cut_off_while_it_was_written_does_not_count(store: StateStore) -> None:
    side = Side()
    side.save(store, step=10)
    cut_off = store.directory / ".000002_step_20.new"
    cut_off.mkdir()
    (cut_off / TENSORS).write_bytes(b"half")
    found = store.newest()
    assert found is not None
    assert found.record.step == 10
    store.remove_unfinished()
    assert names(store.directory) == ["000001_step_10"]


def test_a_full_disk_is_named_and_leaves_the_state_before(store: StateStore) -> None:
    side = Side(width=400)
    side.save(store, step=10)
    with files_of_at_most(2000), pytest.raises(CheckpointNotSaved, match="000002_step_20 could"):
        side.save(store, step=20)
    assert names(store.directory) == ["000001_step_10"]
    saved = store.newest()
    assert saved is not None
    saved.load()


def test_a_damaged_state_is_named(store: StateStore) -> None:
    directory = Side().save(store)
    tensors, record = directory / TENSORS, directory / RECORD
    whole, written = tensors.read_bytes(), record.read_text()

    tensors.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DamagedState, match=f"{TENSORS}: other bytes than were written"):
        read_state(directory).load()
    tensors.write_bytes(whole[:-1])
    with pytest.raises(DamagedState, match=f"{len(whole)} were written"):
        read_state(directory).load()
    tensors.unlink()
    with pytest.raises(DamagedState, match="No such file"):
        read_state(directory).load()
    record.write_text(written[:-10])
    with pytest.raises(DamagedState, match=RECORD):
        store.newest()


def test_every_difference_to_another_model_is_listed(store: StateStore) -> None:
    record = read_state(Side().save(store)).record
    wider = Side(width=5)
    del wider.model.unused
    wider.model.register_parameter("more", nn.Parameter(torch.zeros(1)))
    with pytest.raises(StateMismatch) as told:
        require_fit(record, wider.model, SETTINGS, "here")
    assert str(told.value).splitlines()[1:-1] == [
        "  more: not in the state",
        "  unused: not in the model",
        "  first: saved shape [4, 3], the model's [5, 3]",
        "  second: saved shape [4, 3], the model's [5, 3]",
    ]
    other = record.model_copy(update={"optimizer": "adafactor"})
    with pytest.raises(StateMismatch, match="optimizer: saved adafactor, now adamw"):
        require_fit(other, Side().model, SETTINGS, "here")
    other = record.model_copy(update={"master_dtype": "bfloat16"})
    with pytest.raises(StateMismatch, match="master dtype: saved bfloat16, now float32"):
        require_fit(other, Side().model, SETTINGS, "here")


class EarlierTrainer:
    """What took the steps of `Side` before there were options: `torch.optim.AdamW` on fp32 copies.
    `state`: as its `tensors.safetensors` had it."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.masters = [p.detach().float().requires_grad_() for p in side.model.parameters()]
        self.adamw = torch.optim.AdamW(self.masters, lr=0.1, weight_decay=0.01)

    def step(self, step: int) -> float:
        first, second = (self.side.model.get_parameter(name) for name in ("first", "second"))
        loss = (torch.randn(4, 3) * first + second**2).float().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        taken = self.side.optimizer.gradients
        for index, master in enumerate(self.masters):
            gradient = taken.pop(index)
            master.grad = None if gradient is None else gradient.float()
        norm = torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.adamw.param_groups[0]["lr"] = self.side.optimizer.learning_rate(step)
        self.adamw.step()
        with torch.no_grad():
            for parameter, master in zip(self.side.model.parameters(), self.masters, strict=True):
                parameter.copy_(master)
        return float(norm) + random.random() + float(numpy.random.standard_normal())

    def state(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, master in zip(("first", "second", "unused"), self.masters, strict=True):
            kinds = {"master": master.detach(), **self.adamw.state.get(master, {})}
            found |= {f"{kind}/{name}": tensor for kind, tensor in kinds.items()}
        return found


def test_a_state_of_an_earlier_version_is_gone_on_from_to_the_last_bit(store: StateStore) -> None:
    """Its record says nothing of the masters' data type, and all that is in fp32."""
    earlier = EarlierTrainer(Side())
    for step in range(3):
        earlier.step(step)
    directory = earlier.side.save(store)
    save_file(earlier.state(), directory / TENSORS)
    record = json.loads((directory / RECORD).read_text())
    assert record.pop("master_dtype") == "float32"
    raw = (directory / TENSORS).read_bytes()
    record["files"][TENSORS] = {"size_bytes": len(raw), "sha256": sha256(raw).hexdigest()}
    (directory / RECORD).write_text(json.dumps(record))
    expected = [earlier.step(step) for step in range(3, 8)]

    side = Side(seed=1)
    side.take_up(store.newest())
    assert [side.step(step) for step in range(3, 8)] == expected
    for mine, theirs in zip(side.optimizer.masters, earlier.masters, strict=True):
        assert torch.equal(mine, theirs.detach())
