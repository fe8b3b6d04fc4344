"""The `grpo` command. Options are parsed before torch is imported."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence

import structlog

from grpo_core.cpu import prepare_cpu
from grpo_core.errors import GrpoError
from grpo_core.gpu import OutOfMemory, gpu_error
from grpo_core.logs import configure_logging
from grpo_core.process import killed_with_parent
from grpo_core.settings import load_settings
from grpo_core.settings.machine import does_not_answer
from grpo_core.tree.optim import ProcessOptions
from grpo_core.tree.trainer import TrainerSettings
from grpo_core.tree.trainer_command import CommandLine
from grpo_trainer.errors import EXIT_FAILED, EXIT_LOST, LostRank
from grpo_trainer.stop import STARTED_BY, Stop

LESS_MEMORY = (
    "try --gradient-checkpointing, or lower --tokens-per-micro-batch or the server's share"
)
GOES_ON = "Checkpoints are intact: start the trainer again, and it resumes"


def main(argv: Sequence[str] | None = None) -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        killed_with_parent()  # torchrun's ranks have sessions of their own: they outlive it
        if os.environ.get(STARTED_BY) not in (None, str(os.getppid())):  # it was killed before that
            raise SystemExit(EXIT_LOST)
    words = sys.argv[1:] if argv is None else argv
    line = load_settings(CommandLine, words, at_start=True)
    settings = line.settings()
    is_quiet = line.trainer_rank and settings.log_level == "INFO"
    configure_logging("trainer", "WARNING" if is_quiet else settings.log_level)
    if line.world_size > 1:
        structlog.contextvars.bind_contextvars(rank=line.trainer_rank)
    with _errors_logged(settings, line.processes):
        if line.memory_plan:
            from grpo_trainer.memory_plan import memory_plan, text_of

            sys.stdout.write(text_of(memory_plan(settings, line.processes)))
        elif line.starts_ranks:
            prepare_cpu()

            from grpo_trainer.launch import launch

            # torchrun sets the variables of both; a rank takes the next higher port.
            port = str(settings.master_port - 1)
            weights = ("--master-addr", settings.master_addr, "--master-port", port)
            raise SystemExit(launch(line, settings.device, [*words, *weights]))
        else:
            _train(settings, line)


def _train(settings: TrainerSettings, processes: ProcessOptions) -> None:
    # Before the imports, which take seconds: a wrong URL shows at once.
    if not processes.trainer_rank and (reason := does_not_answer(settings.run_api_url)):
        structlog.get_logger().warning(
            "service.unreachable",
            name="run-api",
            url=settings.run_api_url,
            reason=reason,
            hint="start run-api, or check --run-api-url; the trainer retries",
        )
    stop = Stop(defers=True)
    stop.listen()
    prepare_cpu()

    from grpo_trainer.ranks import process_group, settings_of_leader, settings_of_rank
    from grpo_trainer.train import train

    with process_group(processes) as ranks:
        settings = settings_of_leader(settings, ranks)
        train(settings_of_rank(settings, processes), ranks, stop)


@contextlib.contextmanager
def _errors_logged(settings: TrainerSettings, ranks: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # of torch
        if (found := gpu_error(error, LESS_MEMORY, GOES_ON)) is None:
            raise
        traceback.print_exc()  # shows which part of a step failed
        reason = str(found)
        if isinstance(found, OutOfMemory):
            from grpo_trainer.memory_plan import memory_plan, verdict

            reason += ". The plan: " + "; ".join(verdict(memory_plan(settings, ranks)).splitlines())
        structlog.get_logger().error(type(found).__name__, reason=reason)
        raise SystemExit(EXIT_FAILED) from None
    except GrpoError as error:
        structlog.get_logger().error(type(error).__name__, reason=str(error))
        may_restart = isinstance(error, LostRank) and not error.is_final
        raise SystemExit(EXIT_LOST if may_restart else EXIT_FAILED) from None


if __name__ == "__main__":
    main()
