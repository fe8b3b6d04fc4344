"""What provenance and a watched page cost a training step: `python -m benchmarks.record_cost`.

One run trains on recorded groups. In every other block of steps it computes no digests and records
no batches, and the page's process, which a reader listens to, is stopped. Prints the median of both
kinds of blocks, and that of the ratios of neighbours, in wall time and in CPU time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.same_run import (
    CASES,
    GROUP_SIZE,
    answers,
    running,
    sampled_groups,
    services,
    submit,
)
from grpo_core.clients.run_api import TrainerClient
from grpo_core.cpu import prepare_cpu
from grpo_core.logs import configure_logging
from grpo_core.tree.trainer_command import parse_command
from grpo_runs.process.ports import free_port
from grpo_tiny_model.model import ensure_tiny_model
from grpo_tiny_model.smollm2 import ensure_smollm2
from grpo_trainer.learner import Learner
from grpo_trainer.stop import Stop
from grpo_trainer.train import Lead, open_run, training_steps
from grpo_trainer.weight_sync.build import open_weight_sync

KEPT_STEPS = 5
"""Groups of this many steps are sampled, and trained on again and again."""
READ_EVENTS = """
import psutil
with httpx.stream("GET", "{url}api/events?run={run}", timeout=None) as answer:
    for part in answer.iter_raw():
        print(len(part), flush=True)
"""


@contextlib.contextmanager
def watched(run: Path, directory: Path) -> Iterator[int]:
    """The id of the page's process, whose events somebody reads."""
    url = f"http://127.0.0.1:{(port := free_port())}/"
    command = [str(Path(sys.executable).with_name("grpo-watch")), str(run), "--port", str(port)]
    with running("watch", command, directory, lambda: answers(url)) as page:
        reader = [sys.executable, "-c", READ_EVENTS.format(url=url, run=run.name)]
        log = directory / "reader.log"
        with running("reader", reader, directory, lambda: log.is_file() and log.read_text() != ""):
            yield page.pid


class Recording:
    """Turns provenance and the page on and off."""

    def __init__(self, learner: Learner, lead: Lead, page: int) -> None:
        self._page = page
        self._begin, self._step_taken = learner.digests.begin, lead.provenance.step_taken
        self._learner, self._lead = learner, lead

    def turn(self, on: bool) -> None:
        digests: Any = self._learner.digests
        provenance: Any = self._lead.provenance
        digests.begin = self._begin if on else lambda: None
        provenance.step_taken = self._step_taken if on else lambda *_: None
        os.kill(self._page, signal.SIGCONT if on else signal.SIGSTOP)


def measure(model: Path, blocks: int, steps: int, options: list[str], directory: Path) -> None:
    """Args: blocks: pairs of blocks with and without; steps: of a block"""
    groups = sampled_groups(model, KEPT_STEPS, completion_tokens=32)
    every = (2 * blocks + 1) * steps  # the first block warms up
    times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with services(CASES["shared_vllm"], model, directory, every) as (api_url, of_run):
        settings = parse_command([*of_run, "--seq-len", "64", *options]).settings()
        with (
            TrainerClient(api_url) as api,
            open_run(settings, api, open_weight_sync) as opened,
            watched(directory, directory) as page,
        ):
            assert opened is not None
            learner, lead, position = opened
            assert lead is not None
            recording = Recording(learner, lead, page)
            on, block = True, 0
            submit(api_url, groups)
            before = None
            for now in training_steps(learner, lead, position, Stop()):
                again = groups[now.step % KEPT_STEPS :: KEPT_STEPS]
                submit(api_url, [group | {"scores": scores()} for group in again])
                if now.step % steps:
                    continue
                if before is not None:
                    wall, processor = time.monotonic() - before[0], cpu_s(page) - before[1]
                    times[on].append((wall / steps, processor / steps))
                # the order of a pair changes, against what drifts
                block += 1
                on = block % 4 in (1, 0)
                recording.turn(on)
                before = time.monotonic(), cpu_s(page)
            recording.turn(on=True)
    report(times)


def scores() -> list[float]:
    """Other ones each time, because a batch must not repeat."""
    return [random.random() for _ in range(GROUP_SIZE)]


def cpu_s(page: int) -> float:
    """CPU seconds of this process and the page's."""
    spent = psutil.Process(page).cpu_times()
    return time.process_time() + spent.user + spent.system


def report(times: dict[bool, list[tuple[float, float]]]) -> None:
    for index, name in enumerate(("wall time", "CPU time")):
        with_it, without = ([pair[index] for pair in times[on]] for on in (True, False))
        ratios = sorted(a / b for a, b in zip(with_it, without, strict=True))
        quarter = len(ratios) // 4
        sys.stdout.write(
            f"{name:10} {statistics.median(with_it):.4f} s a step with, "
            f"{statistics.median(without):.4f} without; ratio of pairs: median "
            f"{statistics.median(ratios):.4f}, quartiles {ratios[quarter]:.4f} and "
            f"{ratios[-1 - quarter]:.4f} ({len(ratios)} pairs)\n"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smollm2", action="store_true", help="instead of the tiny model")
    parser.add_argument("--blocks", type=int, default=20, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=5, help="of a block")
    parser.add_argument("--lr", default="1e-6")
    args = parser.parse_args()
    configure_logging("trainer", "WARNING")
    prepare_cpu()
    model = ensure_smollm2() if args.smollm2 else ensure_tiny_model()
    with tempfile.TemporaryDirectory(prefix="record-cost-") as directory:
        measure(model, args.blocks, args.steps, ["--lr", args.lr], Path(directory))


if __name__ == "__main__":
    main()
