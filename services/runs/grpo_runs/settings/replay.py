"""Options of `grpo-provenance` and `grpo-replay`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator

from grpo_core.settings import Command, CommandSettings, Mistake, Shown
from grpo_core.tree.objective import ObjectiveOptions


class _RunSettings(CommandSettings):
    run: Path = Field(description="Directory of the run, or the --save-path of a trainer")

    def start_mistakes(self) -> Iterator[Mistake]:
        if not self.run.is_dir():
            yield Mistake("run", f"no such directory: {self.run}; name the directory of a run")


class ProvenanceSettings(_RunSettings):
    """Compares the checkpoints, exported models and batches of a run with their digests, and names
    what does not match, with exit status 1. With --completion, prints instead which weights sampled
    a completion, and where these come from."""

    command: ClassVar[Command] = Command(
        prog="grpo-provenance",
        env_prefix="GRPO_PROVENANCE_",
        positional=("run",),
        examples=("grpo-provenance runs/latest", "grpo-provenance runs/latest --completion 12/0/3"),
    )

    completion: Annotated[str | None, Shown(default="none", metavar="STEP/GROUP/INDEX")] = Field(
        None, description="The completion: its step, its group and its place in the group"
    )

    @field_validator("completion")
    @classmethod
    def _names_a_completion(cls, value: str | None) -> str | None:
        if value is not None and not (
            value.count("/") == 2 and all(part.isdecimal() for part in value.split("/"))
        ):
            raise ValueError("expected STEP/GROUP/INDEX, for example 12/0/3")
        return value


class ReplaySettings(_RunSettings, ObjectiveOptions):
    """Computes a step of a run again, from the newest checkpoint before it and the recorded
    batches, without run-api and server. Compares loss, gradient norm and weights, and names the
    first difference, with exit status 1.

    With options of the objective, shows what each step would have been with this objective: its
    loss and gradient, at the weights of the run."""

    command: ClassVar[Command] = Command(
        prog="grpo-replay",
        env_prefix="GRPO_REPLAY_",
        positional=("run",),
        groups={
            "Replay": ("step", "threads"),
            "Objective": tuple(ObjectiveOptions.model_fields),
        },
        examples=(
            "grpo-replay runs/latest --step 12",
            "grpo-replay runs/latest --step 12 --objective dapo --clip-eps-high 0.3",
        ),
    )

    step: int = Field(ge=1, description="The step, counted from 1")
    threads: Annotated[int | None, Shown(default="as in the run")] = Field(
        None,
        ge=1,
        description="Number of threads of torch. Another number than in the run changes the last "
        "bits",
    )

    @property
    def objective_options(self) -> dict[str, Any]:
        """Those that were given."""
        given = self.model_fields_set & ObjectiveOptions.model_fields.keys()
        return {name: getattr(self, name) for name in given}
