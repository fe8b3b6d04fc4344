"""GRPOTrainer of TRL beside this project: `python -m benchmarks.against_trl`.

Whole loops take turns, each in processes of its own. `benchmarks.train_step` measures single steps.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from operator import truediv
from pathlib import Path
from statistics import median
from typing import ClassVar

from pydantic import Field

from benchmarks.report import host_facts, number, publish, spread, table, today
from benchmarks.train_bench.sides import (
    Reading,
    all_cores,
    demo_records,
    goal_of,
    in_turn,
    limit_s,
    step_flops,
    trl_side,
    values,
    work_file,
)
from benchmarks.train_bench.work import answer, questions
from grpo_core.logs import configure_logging
from grpo_core.settings import Command, CommandSettings, load_settings
from grpo_tiny_model.model import ensure_tiny_model

SECTION = "training beside TRL"


class TrlBenchSettings(CommandSettings):
    """Train with TRL's GRPOTrainer and with this project, in turns."""

    command: ClassVar[Command] = Command(prog="bench-trl", env_prefix="BENCH_TRL_")

    rounds: int = Field(3, ge=1, description="Times that each side is measured")
    data: Path = Field(description="Directory with GSM8K's train.jsonl")
    threads: int = Field(2, ge=1, description="Threads of TRL")
    results: Path | None = Field(None, description="Markdown file whose section is replaced")


@dataclass(frozen=True)
class TrlLoop:
    """`flags`: of grpo-demo. `micro_batch`: TRL's fastest."""

    name: str
    task: str
    sequences: int
    longest: int
    steps: int
    micro_batch: int
    goal: float
    flags: tuple[str, ...]


LOOPS = (
    TrlLoop("whole loop, sums", "sums", 128, 8, 40, 128, 2.0, ()),
    TrlLoop("whole loop, GSM8K", "gsm8k", 64, 128, 10, 16, 4.0, ("--batch-size", "32")),
)


def main() -> None:
    settings = load_settings(TrlBenchSettings, sys.argv[1:])
    configure_logging("bench-trl")
    with tempfile.TemporaryDirectory() as scratch:
        bench = TrlBench(settings, Path(scratch), ensure_tiny_model())
        rows = [bench.loop(loop) for loop in LOOPS]
    sides = ["TRL", "this project", "limit"]
    heading = ["seconds per step", *sides, "ratio", "goal", "our staleness"]
    lines = [*_introduction(settings.rounds), "", *table([heading, *rows])]
    publish(SECTION, lines, settings.results)


@dataclass(frozen=True)
class TrlBench:
    settings: TrlBenchSettings
    scratch: Path
    tiny: Path

    def loop(self, loop: TrlLoop) -> list[str]:
        asked = questions(loop.task, 2000, self.settings.data)
        work = work_file(
            self.scratch,
            model=str(self.tiny),
            questions=asked,
            answers=[answer(loop.task, question) for question in asked],
            sequences=loop.sequences,
            micro_batch=loop.micro_batch,
            longest=loop.longest,
            steps=loop.steps,
            threads=self.settings.threads,
        )
        sides = {
            "trl": trl_side("loop", work),
            "ours": lambda: self._demo(loop),
            "all cores": all_cores,
        }
        found = in_turn(loop.name, self.settings.rounds, sides)
        theirs, ours = (values(found[side], "step_s") for side in ("trl", "ours"))
        ratio = median(map(truediv, theirs, ours))
        staleness = median(reading["staleness"] for reading in found["ours"])
        return [
            loop.name,
            spread(theirs),
            spread(ours),
            number(limit_s(found)),
            f"{ratio:.1f}",
            goal_of(ratio, loop.goal),
            f"{staleness:.1f}",
        ]

    def _demo(self, loop: TrlLoop) -> Reading:
        flags = ["--steps", str(loop.steps), *loop.flags]
        if loop.task == "gsm8k":
            flags += ["--task", "gsm8k", "--data", str(self.settings.data)]
        records = demo_records(*flags, "--max-completion-tokens", str(loop.longest))
        return {
            "step_s": median(r["train/step_time"] for r in records[3:]),
            "flops": median(step_flops(r, 1 / 3) for r in records[3:]),
            "staleness": median(r["staleness/mean"] for r in records[3:]),
        }


def _introduction(rounds: int) -> list[str]:
    return [
        f"`make bench-trl` on {today()}, {rounds} runs in turn: median (lowest to highest). "
        "*ratio* is TRL over this project, round by round. Both train the same tiny model on the "
        "same prompts, with 128 completions of at most 8 tokens (sums) or 64 of at most 128 "
        "(GSM8K), in groups of 8. A step samples, grades and trains. TRL samples a batch with the "
        "weights that it trains; `grpo-demo` samples the next batch while it trains, so its "
        "completions have a staleness. TRL has the micro-batch size with which it is fastest. "
        "*limit*: the floating-point operations of our step, sampling included, at the highest "
        "rate of float32 matrix products that one core reached in the same run, times the cores.",
        "",
        *host_facts(),
    ]


if __name__ == "__main__":
    main()
