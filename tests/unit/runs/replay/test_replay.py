"""Steps that are computed again from recorded batches are those of the run, bit by bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from grpo_core.provenance.chain import Provenance
from grpo_core.provenance.verify import verify
from grpo_core.rollouts.files import file_of_step
from grpo_core.settings import OptionsInvalid
from grpo_trainer.errors import DamagedState, NotReplayable
from tests.unit.runs.replay.recorded import DROPOUT, STEPS, flip, replay, train

EQUAL = "loss, gradient norm and weights are equal bit by bit"


@pytest.fixture(scope="module")
def whole(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(model, tmp_path_factory.mktemp("run") / "saved")


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "saved"))


def checkpoint(run: Path, step: int) -> Path:
    (found,) = (run / "trainer_state").glob(f"*_step_{step}")
    return found


def test_a_resumed_run_is_replayed_from_its_checkpoint(run: Path) -> None:
    passes, said = replay(run)
    assert passes
    assert said.count(EQUAL) == STEPS - 5
    assert "trainer_state" in said
    assert "not as in the run" not in said


def test_without_checkpoints_all_steps_follow_from_the_model(run: Path) -> None:
    """Also across a start with another learning rate."""
    shutil.rmtree(run / "trainer_state")
    passes, said = replay(run)
    assert passes
    assert said.count(EQUAL) == STEPS


def test_an_adapter_with_dropout_an_adaptive_penalty_and_a_teacher_is_replayed(
    model: str, tmp_path: Path
) -> None:
    run = train(model, tmp_path / "saved", **DROPOUT)
    assert replay(run)[0]
    shutil.rmtree(run / "trainer_state")
    passes, said = replay(run)
    assert passes, said
    file = run / "provenance.jsonl"
    file.write_text(file.read_text().replace('"ranks":1', '"ranks":2'))
    with pytest.raises(NotReplayable, match="2 trainer processes took step 1 with --lora-dropout"):
        replay(run)


def test_a_changed_bit_in_a_batch_is_named(run: Path) -> None:
    file = file_of_step(run / "batches", STEPS)
    flip(file, 4)  # in the time of gzip's header: the groups are the same
    assert verify(Provenance.of(run)).problems == [f"{file}: not the batch of version 2.{STEPS}"]
    with pytest.raises(NotReplayable, match=f"is not the batch of step {STEPS}: .*data"):
        replay(run)


def test_a_changed_bit_in_a_checkpoint_is_named(run: Path) -> None:
    file = checkpoint(run, 5) / "tensors.safetensors"
    flip(file, -1)
    found = verify(Provenance.of(run)).problems
    assert found[-1] == f"{file}: its content has changed since it was written"
    with pytest.raises(DamagedState):
        replay(run)


def test_weights_that_are_not_the_recorded_ones_are_named(run: Path) -> None:
    """The checkpoint fits its own checksum."""
    wrong = checkpoint(run, STEPS)
    shutil.rmtree(checkpoint(run, 5))
    record = wrong / "trainer_state.json"
    record.write_text(record.read_text().replace(f'"step":{STEPS},', '"step":5,', 1))
    wrong.rename(wrong.with_name("000001_step_5"))
    passes, said = replay(run)
    assert not passes
    assert "the first tensor that differs is model.embed_tokens.weight" in said
    assert "model.embed_tokens.weight is not that of version 2.5" in "".join(
        verify(Provenance.of(run)).problems
    )


def test_a_changed_model_is_named(run: Path) -> None:
    file = run / "final_model" / "model.safetensors"
    flip(file, -1)
    assert verify(Provenance.of(run)).problems == [
        f"{file}: its content has changed since it was written"
    ]


def test_another_number_of_threads_and_other_code_are_named(run: Path) -> None:
    file = run / "provenance.jsonl"
    provenance = Provenance.of(run)
    known = provenance.start_of(next(provenance.publications)).code.trainer
    file.write_text(file.read_text().replace(known, "0" * 64))
    passes, said = replay(run, threads=2)
    assert "not as in the run: threads: 1 in the run, 2 here" in said
    assert "not as in the run: code of grpo_trainer: 000000000000 in the run" in said
    assert passes, said


def test_a_step_that_gives_other_numbers_fails(run: Path) -> None:
    file = run / "provenance.jsonl"
    text = file.read_text()
    assert "lr: 0.002" in text
    file.write_text(text.replace("lr: 0.002", "lr: 0.004"))
    passes, said = replay(run)
    assert not passes
    assert "weights        differ; the first tensor that differs is model.embed" in said
    assert "likely cause: none is known" in said


def test_another_objective_shows_what_each_step_would_have_been(run: Path) -> None:
    shutil.rmtree(run / "trainer_state")
    passes, said = replay(run, entropy_coef=0.5, kl_coef=0.1)
    assert passes
    assert said.count(EQUAL) == STEPS
    table = said.splitlines()[-STEPS:]
    assert [row.split()[0] for row in table] == [str(step) for step in range(1, STEPS + 1)]
    assert all(" → " in row for row in table)
    same = replay(run, step=1, loss="clip")[1].splitlines()[-1].split()
    assert same[1] == same[3]
    assert "+1.0000" in same
    assert "+1.0000" not in table[0]


def test_the_own_loss_of_a_run_is_named_beside_another_objective(
    model: str, tmp_path: Path
) -> None:
    (tmp_path / "my.py").write_text(
        "def own(tokens, objective):\n"
        "    return -(tokens.weight * tokens.ratio * tokens.advantages).sum()\n"
    )
    run = train(model, tmp_path / "saved", loss=f"{tmp_path}/my.py:own")
    passes, said = replay(run, step=1, objective="dapo")
    assert passes
    assert f"with the run's loss {tmp_path}/my.py:own on both sides" in said
    assert "on both sides" not in replay(run, step=1, loss="clip")[1]


def test_an_objective_that_excludes_itself_is_refused(run: Path) -> None:
    with pytest.raises(OptionsInvalid, match="--clip-eps-high: has no effect on --loss reinforce"):
        replay(run, loss="reinforce", clip_eps_high=0.3)


def test_what_cannot_be_replayed_says_why(run: Path) -> None:
    with pytest.raises(NotReplayable, match=f"records no step 9; it has steps 1 to {STEPS}"):
        replay(run, step=9)
    file_of_step(run / "batches", 1).unlink()
    with pytest.raises(NotReplayable, match=f"no batch of step 1, only of steps 2 to {STEPS}"):
        replay(run, step=1)
    shutil.rmtree(run / "batches")
    with pytest.raises(NotReplayable, match="--keep-rollouts above 0"):
        replay(run)
