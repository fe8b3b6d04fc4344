"""Options of `grpo-compare`."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args

from pydantic import AfterValidator, Field

from grpo_core.settings import (
    Command,
    CommandSettings,
    CommaSeparated,
    Mistake,
    OptionsInvalid,
    Shown,
    parsed,
)
from grpo_core.settings.machine import not_writable
from grpo_core.settings.options import COMMON, Names, options_of
from grpo_core.settings.sources import as_words, flat
from grpo_core.tree.weights import ModeName
from grpo_runs.run_directory import RUNS, unusable
from grpo_runs.settings.launch_options import each_once
from grpo_runs.settings.run import DEMO_FILE, DemoSettings

SEPARATOR = "--"
SET_FOR_EACH_RUN = frozenset({"mode", "run_dir", "resume", "steps", "seed"})
"""Options of a run that differ from run to run, or that are options of the comparison too."""


class CompareSettings(CommandSettings):
    """Runs grpo-demo in each weight-sync mode with the same model, data and seed, and compares
    time, memory, restarts, dropped requests and rewards.

    All other options are options of grpo-demo, for example --task gsm8k, --lr 1e-4 or
    --trainer.max-staleness 4."""

    command: ClassVar[Command] = Command(
        prog="grpo-compare",
        env_prefix="GRPO_COMPARE_",
        groups={
            "Runs": ("modes", "steps", "seed", "directory"),
            "Machine": ("side_by_side", "gpu_ids"),
        },
        examples=(
            "grpo-compare --steps 20",
            "grpo-compare --modes lora_only,none --task gsm8k --data ./gsm8k",
        ),
        aliases={"training-steps": "steps"},
        passes_on="run_options",
        others=frozenset({"model"}),
    )

    modes: Annotated[CommaSeparated[ModeName], AfterValidator(each_once)] = Field(
        get_args(ModeName),
        min_length=1,
        description="Weight-sync modes to compare, separated by commas. Without --side-by-side, one"
        " mode runs after another",
    )
    steps: int = Field(40, ge=1, description="Number of training steps of each run")
    seed: int = Field(0, ge=0, description="Random seed, the same for all runs")
    directory: Annotated[Path | None, Shown(default="runs/compare-<UTC time>-<seed>")] = Field(
        None, description="New or empty directory for the files of all runs and for the results"
    )
    side_by_side: bool = Field(
        False,
        description="Run all modes at the same time. Runs that share a GPU or the CPU slow each "
        "other down",
    )
    gpu_ids: CommaSeparated[str] = Field(
        (),
        description="With --side-by-side: one GPU per mode, separated by commas. A run sees only "
        "its own GPU (CUDA_VISIBLE_DEVICES)",
    )
    run_options: tuple[str, ...] = Field(
        (), description="Options that grpo-compare passes to grpo-demo in every run"
    )

    @classmethod
    def prepare_file(cls, content: dict[str, Any]) -> dict[str, Any]:
        """Other keys and sections are those of a run's file."""
        own: dict[str, Any] = {}
        words: list[str] = []
        names = Names(DemoSettings.command, options_of(DemoSettings))
        for name, value in flat(DemoSettings, content):
            found = names.find(name.replace("_", "-"))
            field = found.field if found else name.replace("-", "_")
            if field in cls.model_fields:
                own[field] = value
            elif field not in SET_FOR_EACH_RUN:
                words += as_words(name, value)
        return own | ({"run_options": [*own.get("run_options", ()), *words]} if words else {})

    @property
    def passed_on(self) -> list[str]:
        return [word for word in self.run_options if word != SEPARATOR]

    def words_in(self, mode: ModeName) -> list[str]:
        """What the run in this mode gets of `passed_on`. An interval of restarts would make
        lora_only publish its adapter as seldom."""
        kept, words = [], iter(self.passed_on)
        for word in words:
            name, has_value, _ = word.replace("_", "-").partition("=")
            if mode != "lora_only" or not name.endswith("vllm-restart-interval"):
                kept.append(word)
            elif not has_value:
                next(words, None)
        return kept

    def start_mistakes(self) -> Iterator[Mistake]:
        if problem := not_writable(self.directory or RUNS):
            yield Mistake("directory", problem)
        elif self.directory is not None and (problem := unusable(self.directory, "--directory")):
            yield Mistake(None, problem)
        if not any(self.mistakes()):
            yield from self._mistakes_of_runs()

    def mistakes(self) -> Iterator[Mistake]:
        if self.gpu_ids and not self.side_by_side:
            yield Mistake(
                "gpu_ids",
                "this option needs --side-by-side; add --side-by-side, or omit this option",
            )
        elif self.gpu_ids and len(self.gpu_ids) != len(self.modes):
            yield Mistake(
                "gpu_ids",
                f"{len(self.gpu_ids)} GPUs for {len(self.modes)} modes; name one GPU for each mode",
            )
        yield from self._set_for_each_run()

    def _set_for_each_run(self) -> Iterator[Mistake]:
        names = Names(DemoSettings.command, options_of(DemoSettings))
        words = (word.partition("=")[0] for word in self.passed_on if word.startswith("--"))
        for word in dict.fromkeys(words):
            name = word.removeprefix("--").replace("_", "-")
            found = names.find(name)
            if name in COMMON or (found and found.field in SET_FOR_EACH_RUN):
                own = found and found.field in type(self).model_fields
                plain = f"--{found.field}" if found else ""
                fix = f"write {plain} before {SEPARATOR}" if own else "omit it"
                yield Mistake(
                    None, f"{word}: a run of a comparison does not accept this option; {fix}"
                )

    def _mistakes_of_runs(self) -> Iterator[Mistake]:
        """Messages of grpo-demo in each mode, each once."""
        lines: dict[str, None] = {}
        for mode in self.modes if self.run_options else ():
            words = [*self.words_in(mode), "--steps", str(self.steps), "--mode", mode]
            try:
                with contextlib.redirect_stderr(io.StringIO()):  # notes about unused options
                    parsed(DemoSettings, words, at_start=True, below=DEMO_FILE)
            except OptionsInvalid as error:
                lines |= dict.fromkeys(error.lines)
        yield from (Mistake(None, line) for line in lines)
