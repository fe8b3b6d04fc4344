"""Kills and stops the processes of real runs at random: `make chaos`.

Each shape of run trains the tiny model with the settings that users get. A hit sends SIGKILL, or
SIGSTOP and later SIGCONT, to one process or two, and the killed ones are started again as Compose
would. After every hit the run must train another step. At the end of a shape: every group that
run-api acknowledged was trained exactly once or is still queued, steps are consecutive, the served
weights were the trained ones, and no process is left. An offline run ends with the weights of an
undisturbed one.

The seed decides victims, signals and pauses, not the moment within a step. `journal.jsonl` in the
directory has one line for each hit.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.whole_run.chaos.hits import HitLog, say
from tests.whole_run.chaos.offline import OFFLINE, OfflineRun
from tests.whole_run.chaos.queue import UNDISTURBED, QueueRun
from tests.whole_run.commands import COLLECTIVE, LORA_ONLY, LORA_RESTART, SHARED, Shape

SHAPES = {
    "shared_vllm": Shape(SHARED, as_shipped=True),
    "lora_only": Shape(LORA_ONLY, as_shipped=True),
    "lora_restart": Shape(LORA_RESTART, as_shipped=True),
    "none": Shape("none", as_shipped=True),
    "lora_only-3-servers": Shape(LORA_ONLY, servers=3, as_shipped=True),
    "lora_restart-3-servers": Shape(LORA_RESTART, servers=3, as_shipped=True),
    "none-3-servers": Shape("none", servers=3, as_shipped=True),
    "none-2-ranks": Shape("none", ranks=2, as_shipped=True),
    "none-2-ranks-fsdp": Shape("none", ranks=2, fsdp=True, as_shipped=True),
    "none-collective": Shape("none", transport=COLLECTIVE, as_shipped=True),
    "none-full-queue": Shape("none", queue_limit=5, as_shipped=True),
}
SHAPES_IF_NAMED = {
    "lora_only-2-ranks-fsdp": Shape(LORA_ONLY, ranks=2, fsdp=True, as_shipped=True),
    "none-collective-3-servers": Shape("none", servers=3, transport=COLLECTIVE, as_shipped=True),
    "none-2-nodes": Shape(
        "none", ranks=2, nodes=2, fsdp=True, transport=COLLECTIVE, as_shipped=True
    ),
    "smollm2-none-2-ranks": Shape("none", ranks=2, fsdp=True, is_pretrained=True, as_shipped=True),
    "smollm2-shared_vllm": Shape(SHARED, is_pretrained=True, as_shipped=True),
    "smollm2-lora_only": Shape(LORA_ONLY, is_pretrained=True, as_shipped=True),
    "smollm2-none": Shape("none", is_pretrained=True, as_shipped=True),
    "compose-shared_vllm": Shape(SHARED, in_containers=True),
    "compose-lora_only": Shape(LORA_ONLY, in_containers=True),
    "compose-lora_restart": Shape(LORA_RESTART, in_containers=True),
    "compose-none-3-servers": Shape("none", servers=3, in_containers=True),
    UNDISTURBED: Shape(SHARED, queue_limit=5, as_shipped=True),
}


def run_shape(name: str, numbers: Iterable[int], seed: int, log: HitLog) -> None:
    # A shape repeats its choices also without the others.
    dice = random.Random(f"{seed} {name}")
    if name == OFFLINE:
        OfflineRun(dice, log).run(numbers)
    else:
        QueueRun(name, (SHAPES | SHAPES_IF_NAMED)[name], dice, log).run(numbers)


def until(moment: float) -> Iterator[int]:
    """0, 1, 2, and so on, until that moment of the monotonic clock."""
    return itertools.takewhile(lambda _: time.monotonic() < moment, itertools.count())


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.whole_run.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=1000, help="hits in all shapes together")
    parser.add_argument("--minutes", type=float, help="instead: of two shapes that the seed draws")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shapes", default=",".join((*SHAPES, OFFLINE)))
    parser.add_argument("--directory", type=Path, required=True, help="a new directory")
    given: Any = parser.parse_args(words)
    shapes = given.shapes.split(",")
    if given.minutes:
        shapes = random.Random(given.seed).sample(shapes, min(2, len(shapes)))
    log = HitLog(given.directory)
    for index, name in enumerate(shapes):
        hits = given.kills // len(shapes) + (index < given.kills % len(shapes))
        end = time.monotonic() + (given.minutes or 0) * 60 / len(shapes)
        run_shape(name, until(end) if given.minutes else range(hits), given.seed, log)
    for line in log.summary():
        say(line)
    # CI may have other work.
    assert given.minutes or not log.late(), "a run recovered too late"
    hits = sum(bool(hit.victims) for hit in log.hits)
    say(f"{hits} hits with seed {given.seed}: nothing lost, nothing twice")


if __name__ == "__main__":
    main()
