"""The files of a run: how much disk space they take."""

from __future__ import annotations

from pathlib import Path

from grpo_runs.run_directory import RunDirectory


def test_the_disk_space_of_a_run_and_of_its_checkpoints_is_told(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for directory in ("final_model", "trainer_state/000001_step_8"):
        (run.checkpoints / directory).mkdir(parents=True)
    (run.checkpoints / "final_model/model.safetensors").write_bytes(bytes(1_000_000))
    (run.checkpoints / "trainer_state/000001_step_8/tensors").write_bytes(bytes(3_000_000))
    assert run.disk_use().startswith("4 MB; 3 MB of it, in checkpoints/trainer_state, only for")
