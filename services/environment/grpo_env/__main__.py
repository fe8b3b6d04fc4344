"""`env-server TASK ACTION`: exit status 0 when the work is done or on SIGTERM and SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

import structlog

from grpo_core.errors import GrpoError, ModelNotFound
from grpo_core.logs import configure_logging
from grpo_core.settings.machine import MADE_HERE, SMOLLM2
from grpo_core.sockets import no_proxy
from grpo_core.tree.environment import PROG
from grpo_env.settings import EnvServerSettings, load_env_settings

log = structlog.get_logger()

EXIT_FAILURE = 1
_OBJECTS_PER_COLLECTION = 10_000
"""Of the youngest generation. Python collects after 700, which costs 5 % of the CPU time."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main(argv: Sequence[str] | None = None) -> None:
    try:
        settings = load_env_settings(sys.argv[1:] if argv is None else argv, _loaded_items)
        configure_logging("environment", settings.log_level)
        # Nothing is registered yet, so leaving needs no goodbye. As first process of a container a
        # signal without a handler would be ignored while the imports below take their seconds.
        for number in _STOP_SIGNALS:
            signal.signal(number, lambda *_: sys.exit(0))
        _run(_with_made_model(settings))
    except GrpoError as error:
        sys.stderr.write(f"{PROG}: {type(error).__name__}: {error}\n")
        raise SystemExit(EXIT_FAILURE) from None


def _loaded_items(settings: EnvServerSettings) -> Iterator[str]:
    """For `--dry-run`: loads the tasks and reads their rows, as a start does."""
    from grpo_env.assembly import open_tasks
    from grpo_env.tasks.items import evaluation_items

    with contextlib.redirect_stdout(io.StringIO()), open_tasks(settings) as tasks:
        if settings.action == "evaluate":
            items = sum(len(evaluation_items(task)) for task in tasks.tasks)
        else:
            items = len(tasks.training_stream(settings.seed, settings.curriculum))
    yield f"{items} prompts"


def _with_made_model(settings: EnvServerSettings) -> EnvServerSettings:
    """With the directory of a model that this project makes in place of its name."""
    if settings.model not in MADE_HERE:
        return settings
    flags = [f"--{SMOLLM2}"] if settings.model == SMOLLM2 else []
    with tempfile.NamedTemporaryFile("r") as file:
        command = [sys.executable, "-m", "grpo_tiny_model", *flags, "--path-file", file.name]
        if subprocess.run(command).returncode:
            raise ModelNotFound(f"--model {settings.model}: not made; see the lines above")
        return settings.model_copy(update={"model": file.read()})


def _run(settings: EnvServerSettings) -> None:
    from grpo_env.assembly import open_tasks, open_template

    # Libraries of environments and agents reach servers on this machine.
    os.environ.update(no_proxy(os.environ))
    with open_tasks(settings) as tasks:
        if settings.action == "check":
            from grpo_env.actions import check

            check(settings, tasks)
            return
        template = open_template(settings, tasks)
        # Objects made so far live as long as the process, so the garbage collector can skip them.
        gc.freeze()
        gc.set_threshold(_OBJECTS_PER_COLLECTION)
        if settings.action == "process":
            from grpo_env.actions import process as work
        elif settings.action == "evaluate":
            from grpo_env.evaluation import evaluate_once as work
        else:
            from grpo_env.worker import serve as work
        asyncio.run(_until_signal(work(settings, tasks, template)))


async def _until_signal(coroutine: Coroutine[Any, Any, None]) -> None:
    work = asyncio.create_task(coroutine)
    for number in _STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, work.cancel)
    await asyncio.wait([work])
    if work.cancelled():
        log.info("environment.stopped", reason="stop signal")
    else:
        work.result()


if __name__ == "__main__":
    main()
