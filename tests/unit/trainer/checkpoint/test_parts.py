"""Checkpoints that several ranks write and read."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from grpo_tiny_model.model import build_model, build_tokenizer
from grpo_tiny_model.spec import TinySpec
from grpo_trainer.atomic_files import remove_unfinished
from grpo_trainer.checkpoint.parts import TENSORS, StatePart
from grpo_trainer.checkpoint.resume import restore_part
from grpo_trainer.checkpoint.store import STATES, save_part
from grpo_trainer.errors import DamagedState, UnusableSavePath
from grpo_trainer.ranks import ALONE, Ranks
from tests.support.directories import names
from tests.unit.trainer.checkpoint.part_rig import Processes, newest, tensors_of
from tests.unit.trainer.checkpoint.test_state import cut_off, flip_a_bit
from tests.unit.trainer.tiny_policy import model_directory

FORMER = Path(__file__).parents[3] / "upgrade" / "golden.tar.xz"
SECOND = "tensors-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_directory(tmp_path_factory.mktemp("parts") / "model")


@pytest.fixture(scope="module")
def parted(model: Path) -> Path:
    """The save path of a state that two ranks have written."""
    whole, parted = (model.parent / name for name in ("whole", "parted"))
    assert Processes(1).pass_on(model, None, whole) == [0]
    assert Processes(2).pass_on(model, newest(whole), parted) == [0, 0]
    return parted


@pytest.mark.parametrize(
    "others",
    [
        [Processes(3), Processes(1)],
        pytest.param([Processes(1), Processes(2)], marks=pytest.mark.full),
        pytest.param([Processes(2, fsdp=False), Processes(3)], marks=pytest.mark.full),
    ],
    ids=lambda others: "-".join(f"{one.count}{'' if one.fsdp else 'whole'}" for one in others),
)
def test_a_state_passes_through_other_numbers_of_ranks_unchanged(
    others: list[Processes], model: Path, parted: Path, tmp_path: Path
) -> None:
    source = newest(parted)
    expected = tensors_of(source)
    assert (len(source.record.files), source.record.format) == (2, 2)
    for number, processes in enumerate(others):
        assert {*processes.pass_on(model, source, tmp_path / str(number))} == {0}
        source = newest(tmp_path / str(number))
        parts = processes.count if processes.fsdp else 1
        assert (len(source.record.files), source.record.format) == (parts, 1 if parts == 1 else 2)
        found = tensors_of(source)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[path], tensor) for path, tensor in expected.items())


@pytest.mark.full
def test_moments_of_8_bits_keep_their_bits_unless_their_blocks_are_divided(
    model: Path, tmp_path: Path
) -> None:
    source, found = None, list[dict[str, torch.Tensor]]()
    for number, count in enumerate([1, 2, 2, 1]):
        processes = Processes(count, options={"optimizer": "adamw_8bit"})
        assert {*processes.pass_on(model, source, tmp_path / str(number))} == {0}
        source = newest(tmp_path / str(number))
        found.append(tensors_of(source))
    whole, divided, again, last = found
    assert all(torch.equal(again[path], tensor) for path, tensor in divided.items())
    name = "model.embed_tokens.weight"
    assert divided[f"absmax1/{name}"].shape[0] == 2
    for path, tensor in whole.items():
        if "absmax" not in path:
            assert torch.equal(last[path], tensor) or tensor.dtype == torch.uint8, path
    for number in (1, 2):
        first, second = (moments(one, number, name) for one in (whole, last))
        assert 0 < (first - second).abs().max() < 0.02 * first.abs().max()


def moments(tensors: dict[str, torch.Tensor], number: int, name: str) -> torch.Tensor:
    bits = tensors[f"state{number}/{name}"].flatten()
    scales = tensors[f"absmax{number}/{name}"].repeat_interleave(256)[: len(bits)]
    return tensors[f"qmap{number}/{name}"][bits.int()] * scales


@pytest.mark.full
def test_the_state_of_adafactor_which_each_rank_has_whole_passes_unchanged(
    model: Path, tmp_path: Path
) -> None:
    source, found = None, list[dict[str, torch.Tensor]]()
    for number, count in enumerate([1, 2, 1]):
        processes = Processes(count, options={"optimizer": "adafactor"})
        assert {*processes.pass_on(model, source, tmp_path / str(number))} == {0}
        source = newest(tmp_path / str(number))
        found.append(tensors_of(source))
    assert any(path.startswith("row_var/") for path in found[0])
    assert found[0].keys() == found[1].keys() == found[2].keys()
    for other in found[1:]:
        assert all(torch.equal(other[path], tensor) for path, tensor in found[0].items())


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_state_of_former_releases_is_read(count: int, tmp_path: Path) -> None:
    """Their trainer has written the archive."""
    with tarfile.open(FORMER) as archive:
        archive.extractall(tmp_path, filter="data")
    former = newest(tmp_path / "saved")
    assert former.record.step == 2
    assert {*Processes(count).pass_on(tmp_path / "model", former, tmp_path / "again")} == {0}
    expected = load_file(former.directory / TENSORS)
    found = tensors_of(newest(tmp_path / "again"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[path], tensor) for path, tensor in expected.items())


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (flip_a_bit, f"the content of {SECOND} has changed"),
        (cut_off, f"{SECOND} has [0-9]+ bytes, but [0-9]+ were written"),
        (os.unlink, f"cannot read {SECOND}"),
    ],
)
def test_a_damaged_or_missing_part_is_named(
    harm: Callable[[Path], None], told: str, model: Path, parted: Path, tmp_path: Path
) -> None:
    shutil.copytree(parted, tmp_path / "copy")
    saved = newest(tmp_path / "copy")
    harm(saved.directory / SECOND)
    learner = Processes(1).learner(model, ALONE)
    with pytest.raises(DamagedState, match=told):
        saved.load(learner.policy, learner.optimizer)


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_kill_before_the_record_leaves_the_previous_state(
    killed: int, model: Path, parted: Path, tmp_path: Path
) -> None:
    save_path = tmp_path / "saved"
    shutil.copytree(parted, save_path)
    before = newest(save_path)
    codes = Processes(2, killed=killed).pass_on(model, before, save_path)
    assert codes[killed] == -signal.SIGKILL
    assert newest(save_path) == before
    (unfinished,) = (name for name in names(save_path / STATES) if name != before.directory.name)
    assert unfinished == ".000002_step_1.new"
    remove_unfinished(save_path / STATES)
    assert names(save_path / STATES) == [before.directory.name]


def test_a_rank_that_does_not_see_the_save_path_is_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (told,) = save_part(StatePart({}, {}), ALONE, tmp_path / "absent")
    assert "every rank must see the same --save-path" in told
    learner = Processes(1).learner(model, ALONE)
    monkeypatch.setattr(type(learner.optimizer), "parts", 2)
    with pytest.raises(UnusableSavePath, match=r"rank 1 at .* does not see .*/absent; with --fsdp"):
        restore_part(tmp_path / "absent", learner.policy, learner.optimizer, Ranks(2, 1))


def test_a_rank_whose_memory_ends_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 would wait for its part."""

    def write(*_: object) -> str:
        raise MemoryError

    monkeypatch.setattr(StatePart, "write", write)
    monkeypatch.setattr(Ranks, "broadcast", lambda _, value, __: value)
    monkeypatch.setattr(Ranks, "gathered", lambda _, text: [text])
    (told,) = save_part(StatePart({}, {}), Ranks(2, 1), tmp_path)
    assert told == f"rank 1 at {socket.gethostname()}: out of memory"


@pytest.mark.full
def test_no_rank_holds_the_whole_state(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tokenizer = build_tokenizer()
    build_model(len(tokenizer), TinySpec(layers=4, width=768)).save_pretrained(model)
    tokenizer.save_pretrained(model)
    assert Processes(1).pass_on(model, None, tmp_path / "0") == [0]
    assert Processes(2).pass_on(model, newest(tmp_path / "0"), tmp_path / "1") == [0, 0]
    for rank in range(2):
        at_load, at_save, whole = json.loads((tmp_path / "1" / f"memory-{rank}").read_text())
        assert whole > 200e6
        assert at_load < 0.7 * whole
        assert at_save < 0.7 * whole
