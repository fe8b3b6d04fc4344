"""One training step beside TRL and the archived trainer's way: `python -m benchmarks.train_step`.

All sides compute the same loss and gradient norm on the same batch first.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import ClassVar

from pydantic import Field
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from benchmarks.report import host_facts, publish, spread, table, today
from benchmarks.train_bench.sides import (
    Reading,
    goal_of,
    in_turn,
    our_step,
    trl_side,
    values,
    work_file,
)
from benchmarks.train_bench.work import (
    GROUP_SIZE,
    BatchFile,
    advantages,
    batch,
    prompt_tokens,
    questions,
)
from grpo_core.logs import configure_logging
from grpo_core.settings import Command, CommandSettings, load_settings
from grpo_tiny_model.model import ensure_tiny_model

SECTION = "training step"
SAME_LOSS, SAME_NORM = 1e-5, 1e-4
LARGE_VOCABULARY = 151_936
TRL, ARCHIVED, OURS = "TRL", "archived trainer", "this project"
MEMORY_GOAL, FLOPS_GOAL = 2.0, 1.1


class StepBenchSettings(CommandSettings):
    """Take training steps with TRL, like the archived trainer, and with this project, in turns."""

    command: ClassVar[Command] = Command(prog="bench-step", env_prefix="BENCH_STEP_")

    rounds: int = Field(3, ge=1, description="Times that each side is measured")
    data: Path = Field(description="Directory with GSM8K's train.jsonl")
    threads: int = Field(2, ge=1, description="Threads of every side")
    results: Path | None = Field(None, description="Markdown file whose section is replaced")


@dataclass(frozen=True)
class Step:
    """`prompt_tokens`: None for the task's own prompts. `micro_batch`: sequences of one forward
    pass of the others. `tokens`: of one of ours. `goal`: TRL's time over ours."""

    name: str
    task: str
    prompts: int
    group_size: int
    longest: int
    micro_batch: int
    tokens: int
    goal: float | None = None
    prompt_tokens: int | None = None
    is_large: bool = False

    @property
    def steps(self) -> int:
        return 5 if self.task == "sums" and not self.is_large else 3


STEPS = (
    Step("sums, groups of 8", "sums", 16, GROUP_SIZE, 4, 128, 4096, 1.5),
    Step("GSM8K, groups of 8", "gsm8k", 8, GROUP_SIZE, 128, 16, 2048, 4.0),
    Step("GSM8K, nothing shared", "gsm8k", 64, 1, 128, 16, 2048, 1.5),
    Step("151,936 tokens", "sums", 2, GROUP_SIZE, 128, 8, 2048, 1.5, is_large=True),
)


def _growth(name: str, prompts: int, group_size: int, longest: int, prompt: int) -> Step:
    return Step(name, "gsm8k", prompts, group_size, longest, 8, 2048, prompt_tokens=prompt)


GROWTH = (
    *(_growth(f"prompts of {n}", 4, 8, 32, n) for n in (32, 128, 512)),
    *(_growth(f"groups of {n}", 32 // n, n, 32, 128) for n in (2, 8, 32)),
    *(_growth(f"completions of {n}", 4, 8, n, 128) for n in (16, 64, 256)),
)


def main() -> None:
    settings = load_settings(StepBenchSettings, sys.argv[1:])
    configure_logging("bench-step")
    with tempfile.TemporaryDirectory() as scratch:
        bench = StepBench(settings, Path(scratch), ensure_tiny_model())
        compared = [(step, bench.measured(step)) for step in STEPS]
        growth = [(step, bench.measured(step)) for step in GROWTH]
    lines = [*_introduction(settings), "", *_comparison(compared), "", *_growth_table(growth)]
    publish(SECTION, lines, settings.results)


Found = Mapping[str, Sequence[Reading]]


@dataclass(frozen=True)
class StepBench:
    settings: StepBenchSettings
    scratch: Path
    tiny: Path

    def measured(self, step: Step) -> Found:
        """Raises `SystemExit` if the sides differ in their loss or gradient."""
        drawn = self._batch(step)
        work = work_file(
            self.scratch,
            **asdict(drawn),
            advantages=advantages(drawn, step.group_size),
            group_size=step.group_size,
            sequences=len(drawn.prompts),
            micro_batch=min(step.micro_batch, len(drawn.prompts)),
            tokens_per_micro_batch=step.tokens,
            longest=step.longest,
            steps=step.steps,
            threads=self.settings.threads,
        )
        sides = {
            TRL: trl_side("step", work),
            ARCHIVED: our_step("archived_side", work),
            OURS: our_step("our_side", work),
        }
        found = in_turn(step.name, self.settings.rounds, sides)
        readings = [reading for of_side in found.values() for reading in of_side]
        losses, norms = ([reading[key] for reading in readings] for key in ("loss", "norm"))
        if max(losses) - min(losses) > SAME_LOSS or max(norms) > (1 + SAME_NORM) * min(norms):
            raise SystemExit(f"{step.name}: losses {losses} or gradient norms {norms} differ")
        return found

    def _batch(self, step: Step) -> BatchFile:
        model, vocabulary = (self._large(), LARGE_VOCABULARY) if step.is_large else (self.tiny, 256)
        tokenizer = AutoTokenizer.from_pretrained(self.tiny)
        asked = questions(step.task, step.prompts, self.settings.data)
        prompts = [prompt_tokens(tokenizer, question) for question in asked]
        if step.prompt_tokens is not None:
            prompts = [(8 * prompt)[-step.prompt_tokens :] for prompt in prompts]
        return batch(model, vocabulary, prompts, step.longest, step.group_size)

    def _large(self) -> Path:
        """2 layers, 256 wide, 151,936 tokens in the vocabulary, and the tiny model's tokenizer."""
        directory = self.scratch / "large"
        if not directory.exists():
            config = Qwen2Config(
                vocab_size=LARGE_VOCABULARY,
                hidden_size=256,
                intermediate_size=1024,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                tie_word_embeddings=True,
            )
            Qwen2ForCausalLM(config).save_pretrained(directory)
            AutoTokenizer.from_pretrained(self.tiny).save_pretrained(directory)
        return directory


def _comparison(measured: Sequence[tuple[Step, Found]]) -> Iterator[str]:
    rows = []
    for step, found in measured:
        rows.append(_row(step.name, "s", found, "step_s", step.goal))
        if step.is_large:
            rows.append(
                _row(f"{step.name}: memory", "MiB", found, "peak_bytes", MEMORY_GOAL, 2**20)
            )
    yield from table([["", "unit", TRL, ARCHIVED, OURS, "TRL over ours", "goal"], *rows])
    yield ""
    yield "FLOPs of our step over the least (6 x distinct tokens x parameters):"
    yield ""
    rows = []
    for step, found in measured:
        reading = found[OURS][0]
        ratio = reading["flops"] / reading["least_flops"]
        met = "met" if ratio <= FLOPS_GOAL else "**missed**"
        rows.append([step.name, f"{ratio:.2f}", f"at most {FLOPS_GOAL}: {met}"])
    yield from table([["", "ratio", "goal"], *rows])


def _growth_table(measured: Sequence[tuple[Step, Found]]) -> Iterator[str]:
    yield "Growth, in ms per step; where nothing else is said, 4 prompts of 128 tokens, groups of 8"
    yield "and completions of at most 32 tokens:"
    yield ""
    rows = [
        [
            step.name,
            *(spread(values(found[side], "step_s", 1e-3)) for side in (TRL, ARCHIVED, OURS)),
        ]
        for step, found in measured
    ]
    yield from table([["", TRL, ARCHIVED, OURS], *rows])


def _row(
    name: str, unit: str, found: Found, key: str, goal: float | None, scale: float = 1.0
) -> list[str]:
    sides = {side: values(found[side], key, scale) for side in (TRL, ARCHIVED, OURS)}
    ratio = median(sides[TRL]) / median(sides[OURS])
    return [name, unit, *map(spread, sides.values()), f"{ratio:.1f}", goal_of(ratio, goal)]


def _introduction(settings: StepBenchSettings) -> list[str]:
    return [
        f"`make bench-step` on {today()}, {settings.rounds} runs in turn, {settings.threads} "
        "threads: median (lowest to highest). A step is forward pass, backward pass and update on "
        "one batch of random completions, in float32. All sides have the same loss (1e-5) and "
        "gradient norm (1e-4) first. Memory is the peak beside the model's weights. TRL and the "
        "archived trainer's way have the micro-batch size with which TRL is fastest. 151,936 "
        "tokens: a model of 2 layers, 256 wide, with this vocabulary.",
        "",
        *host_facts(),
    ]


if __name__ == "__main__":
    main()
