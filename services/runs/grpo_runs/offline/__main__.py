"""`grpo-offline KEY=VALUE`, or `python run_offline_grpo.py`: one run, or with -m one for each
combination of values."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_core.errors import GrpoError
from grpo_runs.offline.command_line import (
    EXIT_FAILED,
    EXIT_USAGE,
    end,
    exit_on_signals,
    given_names,
    job_keys,
    words_for_hydra,
)
from grpo_runs.offline.errors import KeysInvalid
from grpo_runs.offline.keys import CONFIG_FILE, in_keys, value_of
from grpo_runs.offline.results import RunResult
from grpo_runs.offline.screen import open_screen
from grpo_runs.offline.sweep import Job, report_sweep, write_job

PROG = "grpo-offline"


def main(argv: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else [*argv]
    try:
        prepared = words_for_hydra(words)
    except GrpoError as error:
        end(PROG, EXIT_USAGE, str(error))
    if os.environ.get("WORLD_SIZE", "1") != "1":
        end(PROG, EXIT_USAGE, "one process trains here; run a recipe for several (training.sh)")
    exit_on_signals()
    import hydra

    jobs = Jobs()
    sys.argv = [sys.argv[0], *prepared]
    hydra.main(config_path=str(CONFIG_FILE.parent), config_name=CONFIG_FILE.stem)(jobs.run)()
    if jobs.directory is not None:
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
    directory: Path | None = None

    def run(self, composed: Any) -> None:
        """Run one job. Args: composed: its configuration, by Hydra"""
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode
        from omegaconf import OmegaConf

        job = HydraConfig.get()
        directory = Path(job.runtime.output_dir)
        if job.mode is RunMode.MULTIRUN:
            self.directory = Path(job.sweep.dir).absolute()
        content: Any = OmegaConf.to_container(composed, resolve=True)
        given = {name: value_of(content, name) for name in given_names(job.overrides.task)}
        numbers: dict[str, float] = {}
        error = None
        try:
            _require_own_directory(content, directory)
            numbers = asdict(_trained(content, given, directory, self.directory is not None))
        except GrpoError as failure:
            self.is_usage = isinstance(failure, KeysInvalid)
            error = in_keys(f"{type(failure).__name__}: {failure}")
        except Exception as failure:
            if self.directory is None:
                raise
            error = f"{type(failure).__name__}: {failure}"
        if error is not None:
            self.failed += 1
            sys.stderr.write(f"{PROG}: {error}\n")
        if self.directory is not None:
            write_job(directory, Job(directory.name, given, error=error, **numbers))


def _trained(
    content: dict[str, Any], given: dict[str, Any], directory: Path, is_job: bool
) -> RunResult:
    keys = job_keys(content, given, directory)
    screen = open_screen(keys)
    from grpo_runs.offline.loop import run_offline

    if is_job:
        screen.line(f"\njob {directory.name}: {' '.join(f'{n}={v}' for n, v in given.items())}")
    return run_offline(keys, directory, screen)


def _require_own_directory(content: dict[str, Any], directory: Path) -> None:
    resumed = content["checkpoint"]["resume"]
    if resumed is not None and Path(resumed).absolute() != directory.absolute():
        raise KeysInvalid(
            f"checkpoint.resume={resumed} continues in its directory; omit -m and hydra.run.dir"
        )


if __name__ == "__main__":
    main()
