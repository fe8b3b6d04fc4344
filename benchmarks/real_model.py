"""SmolLM2-135M here and in TRL's GRPOTrainer, in turns: `python -m benchmarks.real_model`."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from pydantic import Field

from benchmarks.run_api_bench import machine
from benchmarks.run_api_bench.report import table
from benchmarks.run_api_bench.results_file import replace_section
from benchmarks.train_bench.demo import demo_records
from benchmarks.train_bench.install import TRL_SIDE, trl_python
from benchmarks.train_bench.turns import Reading, goal_of, in_turn, json_of, spread, values
from benchmarks.train_bench.work import questions
from grpo_core.logs import configure_logging
from grpo_core.settings import Command, CommandSettings, load_settings
from grpo_tiny_model.smollm2 import ensure_smollm2

SECTION = "SmolLM2-135M beside TRL"
REWARD = Path(__file__).parent / "train_bench" / "length_reward.py"
PROMPTS, GROUP_SIZE, LONGEST = 4, 8, 12
WARM_STEPS = 3
"""Of both sides."""


class RealBenchSettings(CommandSettings):
    """Train SmolLM2-135M with TRL's GRPOTrainer and with this project, in turns."""

    command: ClassVar[Command] = Command(prog="bench-real", env_prefix="BENCH_REAL_")

    rounds: int = Field(3, ge=1, description="Times that each side is measured")
    steps: int = Field(8, ge=5, description="Steps of one measurement")
    threads: int = Field(2, ge=1, description="Threads of TRL")
    results: Path | None = Field(None, description="Markdown file whose section is replaced")


@dataclass(frozen=True)
class Loop:
    mode: str
    is_lora: bool
    goal: float


LOOPS = (Loop("shared_vllm", False, 5.0), Loop("lora_only", True, 4.0))


def main() -> None:
    settings = load_settings(RealBenchSettings, sys.argv[1:])
    configure_logging("bench-real")
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(settings, Path(scratch), trl_python(), ensure_smollm2())
        rows = [bench.loop(loop) for loop in LOOPS]
    heading = ["seconds per step", "TRL", "this project", "ratio", "goal", "our staleness"]
    lines = [*_introduction(settings), "", *table([heading, *rows])]
    sys.stdout.write("\n".join([*lines, ""]))
    if settings.results:
        replace_section(settings.results, SECTION, lines)


@dataclass(frozen=True)
class Bench:
    settings: RealBenchSettings
    scratch: Path
    trl: Path
    model: Path

    def loop(self, loop: Loop) -> list[str]:
        asked = questions("sums", 2000, None)
        work = self._written(
            model=str(self.model),
            directory=str(self.scratch / "trl"),
            questions=asked,
            answers=["-"] * len(asked),
            reward="length",
            lora=loop.is_lora,
            sequences=PROMPTS * GROUP_SIZE,
            micro_batch=PROMPTS * GROUP_SIZE,
            longest=LONGEST,
            steps=self.settings.steps,
        )
        data = self.scratch / "rows.jsonl"
        data.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in asked))
        sides = {
            "trl": lambda: json_of([str(self.trl), str(TRL_SIDE), "loop", str(work)]),
            "ours": lambda: self._ours(loop, data),
        }
        found = in_turn(loop.mode, self.settings.rounds, sides)
        theirs, ours = (values(found[side], "step_s") for side in ("trl", "ours"))
        ratio = median(theirs) / median(ours)
        staleness = median(reading["staleness"] for reading in found["ours"])
        return [
            loop.mode,
            spread(theirs),
            spread(ours),
            f"{ratio:.1f}",
            goal_of(ratio, loop.goal),
            f"{staleness:.1f}",
        ]

    def _ours(self, loop: Loop, data: Path) -> Reading:
        records = demo_records(
            [
                *("--model", str(self.model), "--mode", loop.mode),
                *("--task", f"{REWARD}:reward", "--data", str(data)),
                *("--batch-size", str(PROMPTS * GROUP_SIZE)),
                *("--gradient-accumulation-steps", "1", "--group-size", str(GROUP_SIZE)),
                *("--max-completion-tokens", str(LONGEST), "--eval-every", "0"),
                *("--steps", str(2 * self.settings.steps)),
            ]
        )[WARM_STEPS:]
        return {
            "step_s": median(r["train/step_time"] for r in records),
            "staleness": median(r["staleness/mean"] for r in records),
        }

    def _written(self, **work: Any) -> Path:
        path = self.scratch / "work.json"
        path.write_text(json.dumps({**work, "threads": self.settings.threads}))
        return path


def _introduction(settings: RealBenchSettings) -> list[str]:
    today = datetime.now(UTC).date().isoformat()
    return [
        f"`make bench-real` on {today}, {settings.rounds} runs in turn: median (lowest to highest) "
        f"of the seconds per step. {PROMPTS} prompts of {GROUP_SIZE} completions of at most "
        f"{LONGEST} tokens, float32. *ratio* is TRL over this project. A step samples, grades and "
        "trains. TRL samples a batch with the weights that it trains; `grpo-demo` samples the next "
        "batch while it trains, so its completions have a staleness. lora_only: rank 16 on q_proj "
        "and v_proj on both sides.",
        "",
        *(f"- {fact}" for fact in machine.host()),
    ]


if __name__ == "__main__":
    main()
