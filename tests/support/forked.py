"""Processes that are forked from one that has imported torch and the trainer."""

from __future__ import annotations

import functools
import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

PRELOADED = [
    "grpo_trainer.launch",
    "grpo_trainer.ranks",
    "peft",
    "tests.unit.trainer.checkpoint.part_rig",
    "tests.unit.trainer.ranks.launched_rank",
    "tests.unit.trainer.ranks.rank_rig",
    "tests.unit.trainer.ranks.test_loop",
    "tests.unit.trainer.ranks.test_three_servers",
]


@functools.cache
def forked() -> ForkServerContext:
    """Its process imports PRELOADED once, which takes three seconds, and ends with the tests."""
    # The tests of the environment's task code have started one that imports none of these.
    forkserver._forkserver._stop()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context
