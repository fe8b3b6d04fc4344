"""SmolLM2-135M here and in TRL's GRPOTrainer, in turns: `python -m benchmarks.real_model`."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import truediv
from pathlib import Path
from statistics import median
from typing import ClassVar, Literal

from pydantic import Field
from transformers import AutoConfig, AutoTokenizer

from benchmarks.report import host_facts, number, publish, spread, table, today
from benchmarks.train_bench.sides import (
    Reading,
    all_cores,
    demo_records,
    goal_of,
    in_turn,
    limit_s,
    our_step,
    step_flops,
    trl_side,
    values,
    work_file,
)
from benchmarks.train_bench.work import advantages, batch, prompt_tokens, questions
from grpo_core.logs import configure_logging
from grpo_core.settings import Command, CommandSettings, load_settings
from grpo_tiny_model.smollm2 import ensure_smollm2

LOOP_SECTION, STEP_SECTION = "SmolLM2-135M beside TRL: runs", "SmolLM2-135M beside TRL: a step"
REWARD = Path(__file__).parent / "train_bench" / "length_reward.py"
PROMPTS, GROUP_SIZE, LONGEST = 4, 8, 12
STEP_LONGEST, STEP_TOKENS, STEP_STEPS = 128, 1024, 3
STEP_GOAL, MEMORY_GOAL = 4.0, 1 / 0.6
WARM_STEPS = 3
"""Of both sides."""


class RealBenchSettings(CommandSettings):
    """Train SmolLM2-135M with TRL's GRPOTrainer and with this project, in turns."""

    command: ClassVar[Command] = Command(prog="bench-real", env_prefix="BENCH_REAL_")

    rounds: int = Field(3, ge=1, description="Times that each side is measured")
    steps: int = Field(8, ge=5, description="Steps of one measurement")
    threads: int = Field(2, ge=1, description="Threads of TRL, and of both sides in a step")
    data: Path | None = Field(None, description="Directory with GSM8K's train.jsonl")
    part: Literal["all", "loop", "step"] = Field("all", description="What to measure")
    results: Path | None = Field(None, description="Markdown file whose section is replaced")


@dataclass(frozen=True)
class RealLoop:
    mode: str
    is_lora: bool
    goal: float


LOOPS = (RealLoop("shared_vllm", False, 5.0), RealLoop("lora_only", True, 4.0))


def main() -> None:
    settings = load_settings(RealBenchSettings, sys.argv[1:])
    configure_logging("bench-real")
    if settings.part != "loop" and settings.data is None:
        raise SystemExit("bench-real: --data is missing: the directory of GSM8K, for the step")
    with tempfile.TemporaryDirectory() as scratch:
        bench = RealBench(settings, Path(scratch), ensure_smollm2())
        if settings.part != "step":
            rows = [bench.loop(loop) for loop in LOOPS]
            _report(settings, LOOP_SECTION, _about_loops(), rows, "limit")
        if settings.data is not None and settings.part != "loop":
            _report(settings, STEP_SECTION, _about_step(), bench.step(settings.data))


@dataclass(frozen=True)
class RealBench:
    settings: RealBenchSettings
    scratch: Path
    model: Path

    def loop(self, loop: RealLoop) -> list[str]:
        asked = questions("sums", 2000, None)
        work = work_file(
            self.scratch,
            model=str(self.model),
            questions=asked,
            answers=["-"] * len(asked),
            reward="length",
            lora=loop.is_lora,
            sequences=PROMPTS * GROUP_SIZE,
            micro_batch=PROMPTS * GROUP_SIZE,
            longest=LONGEST,
            steps=self.settings.steps,
            threads=self.settings.threads,
        )
        data = self.scratch / "rows.jsonl"
        data.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in asked))
        sides = {
            "trl": trl_side("loop", work),
            "ours": lambda: self._ours(loop, data),
            "all cores": all_cores,
        }
        found = in_turn(loop.mode, self.settings.rounds, sides)
        row = _row(loop.mode, "s a step", found, "step_s", loop.goal)
        return [*row, number(limit_s(found))]

    def step(self, data: Path) -> list[list[str]]:
        """One training step on the same completions. Both have the same loss."""
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        vocabulary = AutoConfig.from_pretrained(self.model).vocab_size
        prompts = [prompt_tokens(tokenizer, q) for q in questions("gsm8k", PROMPTS, data)]
        drawn = batch(self.model, vocabulary, prompts, STEP_LONGEST, GROUP_SIZE)
        work = work_file(
            self.scratch,
            **asdict(drawn),
            advantages=advantages(drawn, GROUP_SIZE),
            group_size=GROUP_SIZE,
            sequences=PROMPTS * GROUP_SIZE,
            micro_batch=GROUP_SIZE,
            tokens_per_micro_batch=STEP_TOKENS,
            longest=STEP_LONGEST,
            steps=STEP_STEPS,
            threads=self.settings.threads,
        )
        sides = {"trl": trl_side("step", work), "ours": our_step("our_side", work)}
        found = in_turn("step", self.settings.rounds, sides)
        return [
            _row("time", "s", found, "step_s", STEP_GOAL),
            _row("memory", "MiB", found, "peak_bytes", MEMORY_GOAL, 2**20),
        ]

    def _ours(self, loop: RealLoop, data: Path) -> Reading:
        records = demo_records(
            *("--model", str(self.model), "--mode", loop.mode),
            *("--task", f"{REWARD}:reward", "--data", str(data)),
            *("--batch-size", str(PROMPTS * GROUP_SIZE)),
            *("--gradient-accumulation-steps", "1", "--group-size", str(GROUP_SIZE)),
            *("--max-completion-tokens", str(LONGEST), "--eval-every", "0"),
            *("--steps", str(2 * self.settings.steps)),
        )[WARM_STEPS:]
        return {
            "step_s": median(r["train/step_time"] for r in records),
            "flops": median(step_flops(r, 1 / 2 if loop.is_lora else 1 / 3) for r in records),
        }


def _row(
    name: str,
    unit: str,
    found: Mapping[str, Sequence[Reading]],
    key: str,
    goal: float,
    scale: float = 1.0,
) -> list[str]:
    theirs, ours = (values(found[side], key, scale) for side in ("trl", "ours"))
    ratio = median(map(truediv, theirs, ours))
    return [name, unit, spread(theirs), spread(ours), f"{ratio:.1f}", goal_of(ratio, goal)]


def _report(
    settings: RealBenchSettings, section: str, about: str, rows: list[list[str]], *more: str
) -> None:
    heading = ["", "unit", "TRL", "this project", "TRL over ours", "goal", *more]
    lines = [
        f"`make bench-real` on {today()}, {settings.rounds} runs in turn: median (lowest to "
        f"highest), the ratio round by round. {about}",
        "",
        *host_facts(),
        "",
        *table([heading, *rows]),
    ]
    publish(section, lines, settings.results)


def _about_loops() -> str:
    return (
        f"{PROMPTS} prompts of {GROUP_SIZE} completions of at most {LONGEST} tokens, float32. A "
        "step samples, grades and trains. TRL samples a batch with the weights that it trains; "
        "`grpo-demo` samples the next two while it trains. lora_only: rank 16 on q_proj and v_proj "
        "on both sides. *limit*: the floating-point operations of our step, sampling included, at "
        "the highest rate of float32 matrix products that one core reached in the same run, times "
        "the cores."
    )


def _about_step() -> str:
    return (
        f"Forward pass, backward pass and update, in float32, on {PROMPTS} prompts of GSM8K with "
        f"{GROUP_SIZE} completions of at most {STEP_LONGEST} random tokens each. TRL's micro-batch "
        f"is a group, ours {STEP_TOKENS} tokens. Both have the same loss. Memory is the peak "
        "beside the weights."
    )


if __name__ == "__main__":
    main()
