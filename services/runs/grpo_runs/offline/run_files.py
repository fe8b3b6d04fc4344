"""The files of a run without services, beside those of every run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from grpo_core.errors import parsing
from grpo_core.settings.sources import read_file
from grpo_core.weights.directory_checks import FINAL_ADAPTER, FINAL_MODEL
from grpo_core.wire.scored_group import ScoredGroup
from grpo_runs.offline.errors import RunUnusable
from grpo_runs.offline.keys import OfflineKeys
from grpo_runs.run_directory import RunDirectory
from grpo_trainer.atomic_files import write_whole

BEFORE = "before"
_EXPORTED = ("step_{}", "adapter_step_{}")


class RunFiles(RunDirectory):
    """`metrics`: one line per optimizer step, by the trainer. `evaluations`: one per evaluation and
    task."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.keys = path / "keys.yaml"
        """From which the run is resumed."""
        self.plot = path / "metrics.png"

    @property
    def model(self) -> Path:
        """The trained model, or its adapter."""
        model, adapter = self.path / FINAL_MODEL, self.path / FINAL_ADAPTER
        return adapter if adapter.is_dir() and not model.is_dir() else model

    def train(self, iteration: int) -> Path:
        return self.path / "metrics" / f"train_iter_{iteration:03}.json"

    def evaluation(self, iteration: int | str) -> Path:
        """Results of the items. Args: iteration: its number, or `BEFORE`"""
        number = iteration if isinstance(iteration, str) else f"iter_{iteration:03}"
        return self.path / "metrics" / f"eval_{number}.json"

    def groups(self, iteration: int) -> Path:
        """The rollouts of an iteration, which a resumed run trains on again."""
        return self.path / "sampled" / f"iter_{iteration:03}.jsonl"

    def write_keys(self, keys: OfflineKeys) -> None:
        content = keys.model_dump(mode="json")
        content["checkpoint"]["resume"] = None
        write_whole(self.keys, yaml.safe_dump(content, sort_keys=False))

    def write_json(self, path: Path, values: dict[str, Any]) -> None:
        write_whole(path, json.dumps(values, indent=2, allow_nan=False) + "\n")

    def write_groups(self, iteration: int, groups: Sequence[ScoredGroup]) -> None:
        lines = (group.model_dump_json(exclude_none=True) + "\n" for group in groups)
        write_whole(self.groups(iteration), "".join(lines))

    def read_groups(self, iteration: int) -> list[ScoredGroup] | None:
        """None if the iteration was not sampled yet."""
        path = self.groups(iteration)
        if not path.is_file():
            return None
        # Not splitlines: a rollout may hold other characters that end a line.
        lines = path.read_bytes().split(b"\n")
        with parsing(f"{path}, which you may remove to sample the iteration again", RunUnusable):
            return [ScoredGroup.model_validate_json(line) for line in lines if line]

    def name_checkpoints(self, steps_per_iteration: int) -> None:
        """Let `checkpoints/iter_000` point at the model that the trainer saved after iteration
        0, and so on. Models that it deleted lose their name."""
        directory = self.path / "checkpoints"
        directory.mkdir(exist_ok=True)
        for link in directory.iterdir():
            if link.is_symlink() and not link.exists():
                link.unlink()
        for pattern in _EXPORTED:
            for saved in self.path.glob(pattern.format("*")):
                step = saved.name.rpartition("_")[2]
                if not step.isdecimal() or int(step) % steps_per_iteration:
                    continue
                link = directory / f"iter_{int(step) // steps_per_iteration - 1:03}"
                if not link.is_symlink():
                    link.symlink_to(Path("..") / saved.name)


def resumed_keys(directory: Path) -> dict[str, Any]:
    """The keys of an earlier run.

    Raises:
        RunUnusable: the directory holds none.
    """
    file = RunFiles(directory).keys
    try:
        return read_file(file)[0]
    except ValueError as error:
        raise RunUnusable(
            f"checkpoint.resume={directory}: {error}; name the directory of a run"
        ) from error
