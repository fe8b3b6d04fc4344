"""A run records where each version of its weights comes from, across a kill and a resume."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_core.errors import BrokenProvenance
from grpo_core.provenance.chain import Provenance, chain_of
from grpo_core.provenance.records import text_of
from grpo_core.provenance.verify import verify
from grpo_core.rollouts.files import read_step, steps_in, write_lines
from grpo_core.wire.policy_version import PolicyVersion
from grpo_runs.replay.provenance import main as command
from grpo_trainer.checkpoint.store import StateStore
from tests.unit.runs.replay.recorded import KILLED_AFTER, STEPS, replay, train
from tests.unit.trainer.ranks.test_loop import digests


@pytest.fixture(scope="module")
def run(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(model, tmp_path_factory.mktemp("run") / "saved")


def test_each_publication_names_its_weights_its_batch_and_its_parent(run: Path) -> None:
    known = Provenance.of(run)
    kept = [(line.version, line.batch_id) for line in known.publications if not line.lost]
    lost = [(line.version, line.batch_id) for line in known.publications if line.lost]
    # Batch 2 was skipped, and batch 5 was taken again.
    first = [((1, 0), None), ((1, 1), 1), ((1, 2), 3), ((1, 3), 4)]
    assert kept == [*first, ((2, 3), None), ((2, 4), 5), ((2, 5), 6), ((2, 6), 7)]
    assert lost == [((1, KILLED_AFTER), 5)]
    back = [line.version for line in known.ancestors(PolicyVersion(2, STEPS))]
    assert back == [version for version, _ in reversed(kept)]
    assert len({line.root for line in known.publications}) == len(kept) + len(lost) - 1
    found = verify(known)
    assert found.problems == []
    assert (found.checkpoints, found.models, found.batches) == (2, 1, STEPS)


@pytest.fixture(scope="module")
def gpu_run(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights have digests as on a GPU."""
    with digests(every_step=False):
        return train(model, tmp_path_factory.mktemp("gpu_run") / "saved")


def test_on_a_gpu_weights_that_are_saved_or_loaded_have_digests(run: Path, gpu_run: Path) -> None:
    known, every = Provenance.of(gpu_run), Provenance.of(run).by_version
    assert known.by_version.keys() == every.keys()
    lacking = {(1, 2), (1, KILLED_AFTER), (2, 4)}
    for line in known.publications:
        full = every[line.version]
        assert (line.batch_id, line.loss, line.lost) == (full.batch_id, full.loss, full.lost)
        expected = (None, ()) if line.version in lacking else (full.root, full.digests)
        assert (line.root, line.digests) == expected, line.version
        if line.parent is not None:
            assert line.parent.root == known.by_version[line.parent.version].root
    found = verify(known)
    assert (found.problems, found.publications, found.undigested) == ([], 9, 3)
    assert (found.checkpoints, found.models, found.batches) == (2, 1, STEPS)


def test_what_was_compared_without_digests_is_counted(
    gpu_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(gpu_run, tmp_path / "saved"))
    command([str(run)])
    assert "9 publications (3 without digests), 2 checkpoints" in capsys.readouterr().out
    shutil.rmtree(run / "trainer_state")
    passes, said = replay(run)
    assert passes, said
    assert f"weights are compared after 4 of {STEPS} steps: others have no digest" in said
    assert said.count("loss, gradient norm and weights are equal bit by bit") == 4
    assert said.count("loss and gradient norm are equal bit by bit") == 2
    second = Provenance.of(run).by_version[PolicyVersion(1, 2)]
    file = run / "provenance.jsonl"
    file.write_text(file.read_text().replace(f'"loss":{second.loss}', '"loss":0.5'))
    passes, said = replay(run, step=2)
    assert not passes
    assert "weights        not recorded" in said


def test_a_chain_says_which_weights_have_no_digest(gpu_run: Path) -> None:
    record = next(iter(read_step(gpu_run / "rollouts", 4)))
    sampled = replace(record, versions=[[1, 2], [1, 2]])
    lines = chain_of(Provenance.of(gpu_run), sampled)
    assert lines[2] == "version 1.2: weights without a digest"


def test_a_checkpoint_without_a_recorded_digest_is_named(gpu_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(gpu_run, tmp_path / "saved"))
    last = Provenance.of(run).by_version[PolicyVersion(2, STEPS)]
    file = run / "provenance.jsonl"
    file.write_text(file.read_text().replace(text_of(last), ""))
    (problem,) = verify(Provenance.of(run)).problems
    assert problem.endswith(f"_step_{STEPS}: no digest of step {STEPS} is recorded")


def test_the_chain_of_a_completion_ends_at_the_base_model(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command([str(run)])
    assert "match their digests" in capsys.readouterr().out
    command([str(run), "--completion", "1/0/1"])
    assert "policy version is not known" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="1"):
        command([str(run), "--completion", "1/0/7"])
    assert "the last is 3/1" in capsys.readouterr().err


def test_a_run_that_keeps_no_steps_moves_those_of_another_run_away(
    model: str, tmp_path: Path
) -> None:
    for name in ("batches", "rollouts"):
        write_lines(tmp_path / name, 1, b"")
    train(model, tmp_path, keep_rollouts=0)
    for name in ("batches", "rollouts"):
        assert (steps_in(tmp_path / f"{name}.1"), (tmp_path / name).exists()) == ([1], False)


def test_records_of_another_run_are_not_those_of_the_checkpoint(
    run: Path, model: str, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    records, metrics = other / "provenance.jsonl", other / "metrics.jsonl"
    records.write_text(records.read_text().replace('"run_uuid":"run"', '"run_uuid":"other"'))
    metrics.write_text('{"step": 1}\n')
    checkpoint = StateStore(run).all()[0]
    train(model, other, resume=str(checkpoint.directory), metrics_file=metrics)
    steps = {line.version.step for line in Provenance.of(other).publications}
    assert steps == set(range(checkpoint.record.step, STEPS + 1))
    assert (other / "metrics.jsonl.1").read_text() == '{"step": 1}\n'
    assert steps_in(other / "batches.1") == steps_in(run / "batches")


def test_a_line_that_was_cut_off_is_left_out_and_a_broken_one_is_named(
    run: Path, tmp_path: Path
) -> None:
    text = (run / "provenance.jsonl").read_text()
    copy = tmp_path / "provenance.jsonl"
    copy.write_text(text[:-10])
    assert len(Provenance.of(tmp_path).lines) == len(Provenance.of(run).lines) - 1
    copy.write_text(text.replace('"root"', '"stem"', 1))
    with pytest.raises(BrokenProvenance, match=r"provenance\.jsonl, line 2: "):
        Provenance.of(tmp_path)
