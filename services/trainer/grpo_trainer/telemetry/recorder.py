"""Writes the record of each step to the log and to every sink, and checks it for alerts. Its
rollouts follow."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

import structlog

from grpo_trainer.config.trainer import TrainerSettings
from grpo_trainer.telemetry.alerts import RangeWatch
from grpo_trainer.telemetry.benchmark import Stopwatch, server_status
from grpo_trainer.telemetry.metrics import StepOutcome, step_record
from grpo_trainer.telemetry.rollout_records import StepRollouts
from grpo_trainer.telemetry.rollout_writer import prepare_rollouts
from grpo_trainer.telemetry.sinks import Sinks, rotate_records, trim_records

log = structlog.get_logger()


class Recorder:
    """Create the recorder when the first step of this process begins.

    `started`: time.monotonic() at creation.
    """

    def __init__(self, settings: TrainerSettings, sinks: Sinks) -> None:
        self._settings = settings
        self._sinks = sinks
        self._ranges = RangeWatch()
        self._stopwatch = Stopwatch()
        self.started = time.monotonic()

    def record(self, outcome: StepOutcome, rollouts: StepRollouts) -> None:
        record = step_record(outcome)
        # The log is read by people: the same metrics by lag are for plots.
        shown = {name: value for name, value in record.items() if not name.startswith("lag_")}
        log.info("step.finished", **shown)
        self._sinks.write(record)
        self._sinks.write_rollouts(rollouts)
        self._ranges.look(record)
        self._stopwatch.add(record, outcome.published.is_served)

    def record_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """To TensorBoard and W&B; the run that evaluates keeps its own file.

        Args: step: steps that the evaluated weights include
        """
        self._sinks.write_evaluation({**metrics, "step": step})

    def report_times(self) -> None:
        """Write the summary to standard output and to benchmark.json."""
        settings = self._settings
        summary = self._stopwatch.summary(
            settings.sync.mode, server_status(settings), settings.save_path
        )
        summary.write(settings.save_path)
        sys.stdout.write(f"\n{summary}")


def begin_records(settings: TrainerSettings, resumed_step: int | None) -> None:
    """Prepare the files of metrics and rollouts: those of another run are put aside, and records of
    steps that a checkpoint lacks are removed.

    Args:
        resumed_step: of the checkpoint that the run resumes from; None without one
    """
    if settings.metrics_file is not None:
        if resumed_step is None:
            rotate_records(settings.metrics_file)
        else:
            trim_records(settings.metrics_file, resumed_step)
    prepare_rollouts(settings, resumed_step)
