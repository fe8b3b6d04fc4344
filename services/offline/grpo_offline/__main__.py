"""`grpo-offline KEY=VALUE`, or `python run_offline_grpo.py`: one run, or with -m one for each
combination of values."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from grpo_core.errors import GrpoError
from grpo_core.logs import configure_logging
from grpo_core.process.threads import share_cores
from grpo_offline.command_line import given_names, job_keys, value_of, words_for_hydra
from grpo_offline.errors import KeysInvalid
from grpo_offline.key_names import Renamed, in_keys
from grpo_offline.keys import CONFIG_FILE

PROG = "grpo-offline"
EXIT_FAILED, EXIT_USAGE = 1, 2


def main(argv: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else [*argv]
    try:
        prepared = words_for_hydra(words)
    except GrpoError as error:
        _end(EXIT_USAGE, str(error))
    if os.environ.get("WORLD_SIZE", "1") != "1":
        _end(EXIT_USAGE, "one process trains here; for several ranks, run a recipe (training.sh)")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    import hydra

    jobs = Jobs()
    sys.argv = [sys.argv[0], *prepared]
    hydra.main(config_path=str(CONFIG_FILE.parent), config_name=CONFIG_FILE.stem)(jobs.run)()
    if jobs.directory is not None:
        from grpo_offline.sweep import report_sweep

        report_sweep(jobs.directory)
    if jobs.failed:
        is_usage = jobs.directory is None and jobs.is_usage
        raise SystemExit(EXIT_USAGE if is_usage else EXIT_FAILED)


@dataclass
class Jobs:
    """Runs the jobs of one command. A job that fails does not end the others.

    `directory`: of the sweep; None for a single run. `is_usage`: the keys of the last job that
    failed are not valid.
    """

    failed: int = 0
    is_usage: bool = False
    directory: Path | None = field(default=None, init=False)

    def run(self, composed: Any) -> None:
        """Args: composed: Hydra's configuration of one job"""
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode
        from omegaconf import OmegaConf

        from grpo_offline.sweep import JobRecord, write_job

        job = HydraConfig.get()
        directory = Path(job.runtime.output_dir)
        if job.mode is RunMode.MULTIRUN:
            self.directory = Path(job.sweep.dir).absolute()
        content: Any = OmegaConf.to_container(composed, resolve=True)
        names = given_names(job.overrides.task)
        given = {name: value_of(content, name) for name in names}
        record = JobRecord(directory=directory.name, overrides=given)
        with self._failures_noted(record):
            _require_own_directory(content, directory)
            record.result = _trained(content, given, directory, job.mode is RunMode.MULTIRUN)
        if self.directory is not None:
            write_job(directory, record)

    @contextlib.contextmanager
    def _failures_noted(self, record: Any) -> Iterator[None]:
        try:
            yield
        except GrpoError as error:
            self.is_usage = isinstance(error, KeysInvalid)
            record.error = in_keys(f"{type(error).__name__}: {error}")
        except Exception as error:
            if self.directory is None:
                raise
            record.error = f"{type(error).__name__}: {error}"
        if record.error is not None:
            self.failed += 1
            sys.stderr.write(f"{PROG}: {record.error}\n")


def _trained(content: dict[str, Any], given: dict[str, Any], directory: Path, is_job: bool) -> Any:
    keys = job_keys(content, given)
    configure_logging("offline", keys.logging.level, [Renamed()])
    share_cores()
    from transformers.utils.logging import disable_progress_bar

    from grpo_offline.loop import run_offline
    from grpo_offline.screen import Screen

    disable_progress_bar()
    screen = Screen()
    if is_job:
        screen.say(f"\njob {directory.name}: {' '.join(f'{n}={v}' for n, v in given.items())}")
    return run_offline(keys, directory, screen)


def _require_own_directory(content: dict[str, Any], directory: Path) -> None:
    resumed = content["checkpoint"]["resume"]
    if resumed is not None and Path(resumed).absolute() != directory.absolute():
        raise KeysInvalid(
            f"checkpoint.resume={resumed} continues the run in its own directory; leave -m and "
            "hydra.run.dir out"
        )


def _end(status: int, message: str) -> NoReturn:
    sys.stderr.write(f"{PROG}: {message}\n")
    raise SystemExit(status)


def _stop(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
