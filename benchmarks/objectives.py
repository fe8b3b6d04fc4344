"""The named objectives on the demo's task, with its tiny model: `python -m benchmarks.objectives`.

Shows that each of them trains; a task this small does not rank them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, get_args

from pydantic import Field

from benchmarks.run_api_bench import machine
from benchmarks.run_api_bench.report import table
from benchmarks.run_api_bench.results_file import replace_section
from benchmarks.train_bench.demo import demo_records
from benchmarks.train_bench.turns import in_turn, spread, values
from grpo_core.logs import configure_logging
from grpo_core.settings import Command, CommandSettings, load_settings
from grpo_core.tree.objectives import ObjectiveName

SECTION = "objectives"
COUNTED = 10
VARIANTS: dict[str, tuple[str, ...]] = {
    **{name: ("--trainer.objective", name) for name in get_args(ObjectiveName)},
    "gspo, wider range": (
        *("--trainer.objective", "gspo"),
        *("--trainer.clip-eps", "0.02", "--trainer.clip-eps-high", "0.02"),
    ),
    "grpo, KL penalty": ("--trainer.kl-coef", "0.01"),
    "reinforce_plus_plus, KL penalty": (
        *("--trainer.objective", "reinforce_plus_plus"),
        *("--trainer.kl-coef", "0.01"),
    ),
    "grpo, entropy bonus": ("--trainer.entropy-coef", "0.01"),
}


class ObjectiveBenchSettings(CommandSettings):
    """Train the tiny model with each objective, in turns."""

    command: ClassVar[Command] = Command(prog="bench-objectives", env_prefix="BENCH_OBJECTIVES_")

    rounds: int = Field(3, ge=1, description="Runs of each objective, each with another seed")
    steps: int = Field(60, ge=COUNTED, description="Training steps of each run")
    results: Path | None = Field(None, description="Markdown file whose section is replaced")


def main() -> None:
    settings = load_settings(ObjectiveBenchSettings, sys.argv[1:])
    configure_logging("bench-objectives")
    seeds = {name: iter(range(settings.rounds)) for name in VARIANTS}
    sides = {
        name: lambda n=name: _outcome(settings.steps, next(seeds[n]), VARIANTS[n])
        for name in VARIANTS
    }
    found = in_turn(SECTION, settings.rounds, sides)
    heading = ["", "first steps", "last steps", "entropy", "clipped", "seconds per step"]
    keys = ("first", "last", "entropy", "clipped", "step_s")
    rows = [
        [name, *(spread(values(of_one, key)) for key in keys)] for name, of_one in found.items()
    ]
    lines = [*_introduction(settings), "", *table([heading, *rows])]
    sys.stdout.write("\n".join([*lines, ""]))
    if settings.results:
        replace_section(settings.results, SECTION, lines)


def _outcome(steps: int, seed: int, flags: Sequence[str]) -> dict[str, Any]:
    records = demo_records(["--steps", str(steps), "--seed", str(seed), *flags])
    first, last = records[:COUNTED], records[-COUNTED:]
    return {
        "first": fmean(record["reward/mean"] for record in first),
        "last": fmean(record["reward/mean"] for record in last),
        "entropy": fmean(record["policy/entropy"] for record in last),
        "clipped": fmean(record["grpo/clipped_fraction"] for record in last),
        "step_s": fmean(record["train/step_time"] for record in last),
    }


def _introduction(settings: ObjectiveBenchSettings) -> list[str]:
    today = datetime.now(UTC).date().isoformat()
    return [
        f"`make bench-objectives` on {today}: `grpo-demo` with {settings.steps} steps of one-digit "
        f"sums and the tiny model, {settings.rounds} seeds: median (lowest to highest). *first* "
        f"and *last steps*: mean reward over {COUNTED} steps. Entropy (nats), clipped fraction and "
        "time are those of the last steps. All have the demo's learning rate, which was chosen for "
        "`grpo`.",
        "",
        *(f"- {fact}" for fact in machine.host()),
    ]


if __name__ == "__main__":
    main()
