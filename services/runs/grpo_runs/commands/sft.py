"""`grpo-sft`: supervised training before GRPO."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from grpo_core.errors import GrpoError
from grpo_core.gpu import VISIBLE_GPUS, visible_gpu
from grpo_core.settings.machine import MADE_HERE
from grpo_env.rollout.chat_template import load_template
from grpo_env.tasks import TaskOptions
from grpo_env.tasks.tool_calls import THOUGHTS
from grpo_runs.models import longest_sequence
from grpo_runs.process.records import ProcessRecords
from grpo_runs.process.stack import Stack, StopRequest, StopRequested
from grpo_runs.report.summary import counted
from grpo_runs.run_directory import RunDirectory
from grpo_runs.screen import Screen
from grpo_runs.services import make_model
from grpo_runs.settings.sft import SftSettings
from grpo_runs.sft.examples import Example, read_examples, tokenised

if TYPE_CHECKING:
    from grpo_runs.sft.training import SftResult

MODEL, RESULT = "model", "sft.json"
"""In the directory of --output: the trained model, and what came of the training."""
_INSTALL = "pip install -c requirements/constraints.txt trl"
LINES_OF_PROGRESS = 10


class TrlMissing(GrpoError):
    """The package `trl`, which trains the model, is not installed."""


def train(settings: SftSettings, screen: Screen) -> int:
    """Returns the exit status."""
    try:
        if find_spec("trl") is None:
            raise TrlMissing(f"the Python package trl is not installed; run `{_INSTALL}`")
        options = TaskOptions(
            data=settings.data,
            data_config=settings.data_config,
            columns=settings.columns,
            system_prompt=settings.system_prompt,
        )
        examples = read_examples(options)  # before anything heavy is imported
        run = RunDirectory(settings.output)
        run.logs.mkdir(parents=True)
        with ProcessRecords(run).of_the_end():
            result = _train(settings, examples, run, screen)
    except StopRequested as stopped:
        screen.failure(f"{stopped}; no model was written")
        return stopped.exit_status
    except (GrpoError, OSError, SafetensorError) as error:
        return screen.failed(error)
    screen.line(
        f"loss on {counted(result.measured_examples, 'example')}: {result.loss_before:.3f} before, "
        f"{result.loss_after:.3f} after {counted(result.steps, 'step')} with {result.tokens:,} "
        f"tokens in {result.seconds:.0f} s"
    )
    screen.line(f"model: {run.path / MODEL}")
    return 0


def _train(
    settings: SftSettings, examples: Sequence[Example], run: RunDirectory, screen: Screen
) -> SftResult:
    """Raises:
    StopRequested: the user ended it.
    GrpoError: the model, its template or the device cannot be used, or training diverges.
    OSError, SafetensorError: a file could not be written.
    """
    model = settings.model
    if model in MADE_HERE:
        with StopRequest() as stop_request, Stack(run.logs, stop_request) as stack:
            model = make_model(stack, screen, model)
    with screen.activity(f"{counted(len(examples), 'example')}; loading TRL"):
        _show_one_gpu(settings.device)
        from grpo_runs.sft.training import train_and_save  # torch, before transformers without it

        limit = min(settings.seq_len, longest_sequence(model) or settings.seq_len)
        usable = tokenised(examples, load_template(model), limit)
    if left_out := len(examples) - len(usable):
        screen.warning(f"{left_out} of {len(examples)} examples exceed {limit} tokens, left out")
    if lacking := sum(one.lacks_thought for one in usable):
        screen.warning(
            f"{lacking} of {len(usable)} answers have a thought ({', '.join(THOUGHTS)}) that the "
            "chat template does not show, so only the rest of them is learned; use a template that "
            "reads it, or write it into the content"
        )

    def show(step: int, steps: int, loss: float) -> None:
        if step * LINES_OF_PROGRESS // steps > (step - 1) * LINES_OF_PROGRESS // steps:
            screen.line(f"step {step} of {steps}: loss {loss:.3f}")

    try:
        with screen.waiting(lambda: f"training; each step is in {run.metrics}"):
            result = train_and_save(settings, model, usable, run.metrics, run.path / MODEL, show)
    except KeyboardInterrupt:
        raise StopRequested(signal.SIGINT) from None
    content = settings.model_dump(mode="json") | asdict(result)
    (run.path / RESULT).write_text(json.dumps(content, indent=2) + "\n")
    return result


def _show_one_gpu(device: str) -> None:
    """Before torch is imported. With several GPUs in sight, TRL refuses to train in one process."""
    kind, _, number = device.partition(":")
    if kind != "cpu" and os.environ.get(VISIBLE_GPUS) != "":
        os.environ[VISIBLE_GPUS] = visible_gpu(int(number or 0), f"--device {device}")
