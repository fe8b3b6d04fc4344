"""GRPOTrainer of TRL beside this project: `python -m benchmarks.against_trl`.

Whole loops take turns, and so do single steps on one batch. Each runs in processes of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import structlog
import torch
from pydantic import Field
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from benchmarks.run_api_bench import machine
from benchmarks.run_api_bench.report import table
from benchmarks.run_api_bench.results_file import replace_section
from benchmarks.trl_bench.install import trl_python
from benchmarks.trl_bench.work import GROUP_SIZE, BatchFile, answer, batch, prompt_tokens, questions
from grpo_core.logs import configure_logging
from grpo_core.settings import Command, CommandSettings, load_settings
from grpo_tiny_model.model import ensure_tiny_model
from grpo_trainer.algo.advantage import group_advantages

SECTION = "training beside TRL"
TRL_SIDE = Path(__file__).parent / "trl_bench" / "trl_side.py"
SAME_LOSS = 1e-5
LARGE_VOCABULARY = 151_936
_log = structlog.get_logger()


class TrlBenchSettings(CommandSettings):
    """Train with TRL's GRPOTrainer and with this project, in turns."""

    command: ClassVar[Command] = Command(prog="bench-trl", env_prefix="BENCH_TRL_")

    rounds: int = Field(3, ge=1, description="Times that each side is measured")
    data: Path = Field(description="Directory with GSM8K's train.jsonl")
    threads: int = Field(2, ge=1, description="Threads of TRL, and of a single step on each side")
    parts: str = Field("loop,step", description="What to measure: loop, step")
    results: Path | None = Field(None, description="Markdown file whose section is replaced")


@dataclass(frozen=True)
class Loop:
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
    Loop("whole loop, sums", "sums", 128, 8, 40, 128, 2.0, ()),
    Loop("whole loop, GSM8K", "gsm8k", 64, 128, 10, 16, 4.0, ("--batch-size", "32")),
)


@dataclass(frozen=True)
class Step:
    """`micro_batch`: TRL's fastest, in sequences. `tokens`: of one of our micro-batches."""

    name: str
    task: str
    prompts: int
    group_size: int
    longest: int
    micro_batch: int
    tokens: int
    goal: float
    is_large: bool = False


STEPS = (
    Step("step, sums, groups of 8", "sums", 16, GROUP_SIZE, 4, 128, 4096, 1.5),
    Step("step, GSM8K, groups of 8", "gsm8k", 8, GROUP_SIZE, 128, 16, 2048, 4.0),
    Step("step, GSM8K, nothing shared", "gsm8k", 64, 1, 128, 16, 2048, 1.5),
    Step("step, 151,936 tokens", "sums", 4, GROUP_SIZE, 16, 8, 2048, 1.5, is_large=True),
)

Reading = dict[str, Any]


def main() -> None:
    settings = load_settings(TrlBenchSettings, sys.argv[1:])
    configure_logging("bench-trl")
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(settings, Path(scratch), trl_python(), ensure_tiny_model())
        rows = [
            *(bench.loop(loop) for loop in LOOPS if "loop" in settings.parts),
            *(row for step in STEPS if "step" in settings.parts for row in bench.step(step)),
        ]
    heading = ["", "unit", "TRL", "this project", "ratio", "goal"]
    lines = [*_introduction(settings.rounds), "", *table([heading, *rows])]
    sys.stdout.write("\n".join([*lines, ""]))
    if settings.results:
        replace_section(settings.results, SECTION, lines)


@dataclass(frozen=True)
class Bench:
    settings: TrlBenchSettings
    scratch: Path
    trl: Path
    tiny: Path

    def loop(self, loop: Loop) -> list[str]:
        asked = questions(loop.task, 2000, self.settings.data)
        file = self._written(
            model=str(self.tiny),
            directory=str(self.scratch / "trl"),
            questions=asked,
            answers=[answer(loop.task, question) for question in asked],
            sequences=loop.sequences,
            micro_batch=loop.micro_batch,
            longest=loop.longest,
            steps=loop.steps,
        )
        sides = {
            "trl": lambda: _json_of([str(self.trl), str(TRL_SIDE), "loop", str(file)]),
            "ours": lambda: self._demo(loop),
        }
        found = self._in_turn(loop.name, sides)
        return _row(loop.name, "s", found, "step_s", loop.goal)

    def _demo(self, loop: Loop) -> Reading:
        command = [sys.executable, "-m", "grpo_local", "--steps", str(loop.steps), *loop.flags]
        if loop.task == "gsm8k":
            command += ["--task", "gsm8k", "--data", str(self.settings.data)]
        command += ["--max-completion-tokens", str(loop.longest)]
        with tempfile.TemporaryDirectory() as directory:
            subprocess.run(command, cwd=directory, check=True, stdout=subprocess.DEVNULL)
            metrics = Path(directory) / "runs" / "latest" / "metrics.jsonl"
            records = [json.loads(line) for line in metrics.read_text().splitlines()]
        return {"step_s": median(r["train/step_time"] for r in records[3:])}

    def step(self, step: Step) -> list[list[str]]:
        model, vocabulary = (self._large(), LARGE_VOCABULARY) if step.is_large else (self.tiny, 256)
        tokenizer = AutoTokenizer.from_pretrained(self.tiny)
        asked = questions(step.task, step.prompts, self.settings.data)
        prompts = [prompt_tokens(tokenizer, question) for question in asked]
        drawn = batch(model, vocabulary, prompts, step.longest, step.group_size)
        file = self._written(
            **asdict(drawn),
            directory=str(self.scratch / "trl"),
            advantages=_advantages(drawn, step.group_size),
            group_size=step.group_size,
            sequences=len(drawn.prompts),
            micro_batch=step.micro_batch,
            tokens_per_micro_batch=step.tokens,
            longest=step.longest,
            steps=3 if step.is_large else 5,
        )
        ours = [sys.executable, "-m", "benchmarks.trl_bench.our_side", str(file)]
        sides = {
            "trl": lambda: _json_of([str(self.trl), str(TRL_SIDE), "step", str(file)]),
            "ours": lambda: _json_of(ours),
        }
        found = self._in_turn(step.name, sides)
        losses = [reading["loss"] for readings in found.values() for reading in readings]
        if max(losses) - min(losses) > SAME_LOSS:
            raise SystemExit(f"{step.name}: the losses differ: {sorted(set(losses))}")
        rows = [_row(step.name, "s", found, "step_s", step.goal)]
        if step.is_large:
            rows.append(_row(f"{step.name}: memory", "MiB", found, "peak_bytes", 2.0, 2**20))
        return rows

    def _in_turn(
        self, name: str, sides: Mapping[str, Callable[[], Reading]]
    ) -> dict[str, list[Reading]]:
        found: dict[str, list[Reading]] = {side: [] for side in sides}
        for turn in range(self.settings.rounds):
            for side, measure in sides.items():
                found[side].append(measure())
                _log.info("measured", name=name, side=side, turn=turn, **_numbers(found[side][-1]))
        return found

    def _written(self, **work: Any) -> Path:
        path = self.scratch / "work.json"
        path.write_text(json.dumps({**work, "threads": self.settings.threads}))
        return path

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


def _advantages(drawn: BatchFile, group_size: int) -> list[float]:
    scores = torch.tensor(drawn.scores).view(-1, group_size)
    found: list[float] = torch.cat([group_advantages(group) for group in scores]).tolist()
    return found


def _json_of(command: Sequence[str]) -> Reading:
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: Reading = json.loads(done.stdout.splitlines()[-1])
    return found


def _numbers(reading: Reading) -> Reading:
    return {name: value for name, value in reading.items() if isinstance(value, float | int)}


def _row(
    name: str,
    unit: str,
    found: Mapping[str, Sequence[Reading]],
    key: str,
    goal: float,
    scale: float = 1.0,
) -> list[str]:
    theirs, ours = (sorted(r[key] / scale for r in found[side]) for side in ("trl", "ours"))
    ratio = median(theirs) / median(ours)
    met = "met" if ratio >= goal else "**missed**"
    return [name, unit, _spread(theirs), _spread(ours), f"{ratio:.1f}", f"{goal:g}: {met}"]


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.3g} ({values[0]:.3g} to {values[-1]:.3g})"


def _introduction(rounds: int) -> list[str]:
    today = datetime.now(UTC).date().isoformat()
    return [
        f"`make bench-trl` on {today}, {rounds} runs in turn: median (lowest to highest). *ratio* "
        "is TRL over this project. Both train the same tiny model on the same prompts, with 128 "
        "completions of at most 8 tokens (sums) or 64 of at most 128 (GSM8K), in groups of 8. A "
        "whole loop samples, grades and trains; `grpo-demo` samples the next batch while it "
        "trains. A step is forward pass, backward pass and update on one batch; both sides must "
        "have the same loss (1e-5). TRL has the micro-batch size with which it is fastest.",
        "",
        *(f"- {fact}" for fact in machine.host()),
    ]


if __name__ == "__main__":
    main()
