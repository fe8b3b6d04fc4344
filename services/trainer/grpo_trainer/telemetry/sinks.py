"""Writes the record of each step to the log, the metrics file, Prometheus and experiment trackers,
and its rollouts to files."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from grpo_core.closing import ClosesOnExit
from grpo_core.errors import WandbUnavailable
from grpo_core.metrics_port import serving_metrics
from grpo_core.tracker import TrackerSink
from grpo_core.trackio_run import PROJECT, start_trackio
from grpo_core.tree.trainer import TrainerSettings
from grpo_core.wandb_run import start_wandb
from grpo_trainer.atomic_files import write_whole
from grpo_trainer.checks.findings import RangeWatch
from grpo_trainer.errors import CheckpointNotSaved, MetricsNotWritten
from grpo_trainer.telemetry.benchmark import RunTotals, servers_of
from grpo_trainer.telemetry.metrics import Record, Stage, StepOutcome, StepWatch, step_record
from grpo_trainer.telemetry.prometheus import TrainerMetrics
from grpo_trainer.telemetry.rollouts import (
    RolloutWriter,
    StepRollouts,
    free_name,
    prepare_rollouts,
    rollouts_directory,
    sample_table,
    samples_are_due,
)
from grpo_trainer.telemetry.speed import Speed

log = structlog.get_logger()

CHECKPOINTS = "checkpoints"
"""Name of --save-path in the directory of a local run."""
Write = Callable[[Record], None]
WriteRollouts = Callable[[StepRollouts], None]


@dataclass(frozen=True)
class Sinks:
    """The configured sinks of a step's record, and those of its rollouts."""

    records: Sequence[Write] = ()
    rollouts: Sequence[WriteRollouts] = ()
    evaluations: Sequence[Write] = ()
    stages: Sequence[Callable[[Stage], None]] = ()

    def enter(self, stage: Stage) -> None:
        for tell in self.stages:
            tell(stage)

    def write(self, record: Record) -> None:
        for writer in self.records:
            writer(record)

    def write_rollouts(self, rollouts: StepRollouts) -> None:
        """After the record of the same step."""
        for writer in self.rollouts:
            writer(rollouts)


@contextlib.contextmanager
def open_sinks(settings: TrainerSettings, steps_taken: int = 0) -> Iterator[Sinks]:
    """Yield every configured sink.

    Args:
        steps_taken: of the checkpoint that the run goes on from, else 0. TensorBoard hides the
            records of later steps, which a killed trainer wrote

    Raises:
        WandbUnavailable, TrackioUnavailable: the tracker cannot start.
        MetricsNotServed: nothing can listen on --metrics-port.
    """
    with contextlib.ExitStack() as stack:
        writers: list[Write] = []
        boards: list[Write] = []
        keepers: list[WriteRollouts] = []
        if settings.metrics_file is not None:
            writers.append(partial(append_record, settings.metrics_file))
        if settings.tensorboard_dir is not None:
            boards.append(stack.enter_context(tensorboard(settings.tensorboard_dir, steps_taken)))
        if settings.use_wandb:
            sink = stack.enter_context(wandb_sink(settings))
            boards.append(sink.write)
            keepers.append(partial(write_samples, sink))
        if "trackio" in settings.report_to:
            boards.append(stack.enter_context(trackio_sink(settings, steps_taken)).write)
        if settings.keep_rollouts:
            writer = RolloutWriter(rollouts_directory(settings), settings.keep_rollouts)
            keepers.append(stack.enter_context(contextlib.closing(writer)).add)
        metrics = TrainerMetrics(settings.save_path)
        stack.enter_context(serving_metrics(settings.metrics_host, settings.metrics_port, metrics))
        file = stack.enter_context(StageFile(settings.save_path))
        stages = (metrics.enter, file.enter)
        yield Sinks([*writers, metrics.write, *boards], keepers, boards, stages)


@contextlib.contextmanager
def tensorboard(directory: Path, steps_taken: int) -> Iterator[Write]:
    """Every metric of a record as a scalar of its step, readable at once."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(directory, purge_step=steps_taken + 1)

    def write(record: Record) -> None:
        for name, value in record.items():
            writer.add_scalar(name, value, int(record["step"]))
        writer.flush()

    with contextlib.closing(writer):
        yield write


def wandb_sink(settings: TrainerSettings) -> TrackerSink:
    """Open the trainer's run in W&B.

    Raises:
        WandbUnavailable: W&B cannot start, or the file with the key cannot be read.
    """
    key = _api_key(settings.wandb_key_file)
    group = settings.wandb_group
    return start_wandb(settings.wandb_project, group, _options(settings), api_key=key)


def trackio_sink(settings: TrainerSettings, steps_taken: int) -> TrackerSink:
    """Open the trainer's run in Trackio. It is named after its directory, so that a resumed run
    finds itself.

    Raises:
        TrackioUnavailable: Trackio cannot start.
    """
    directory = settings.save_path.resolve()
    name = (directory.parent if directory.name == CHECKPOINTS else directory).name
    return start_trackio(
        settings.wandb_project or PROJECT,
        settings.wandb_group or None,
        _options(settings),
        name=name,
        goes_on=steps_taken > 0,
    )


def _options(settings: TrainerSettings) -> dict[str, Any]:
    """Named as on the command line, without secrets."""
    options = settings.model_dump(mode="json")
    return {**options, **options.pop("sync")}


def write_samples(sink: TrackerSink, rollouts: StepRollouts) -> None:
    if samples_are_due(rollouts.step):
        sink.write_table(sample_table(rollouts))


def _api_key(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return file.read_text().strip() or None
    except (OSError, UnicodeDecodeError) as error:
        raise WandbUnavailable(
            f"--wandb-key-file {file}: {error}; name a file that contains only the API key"
        ) from error


class Recorder:
    """Records every step, and checks its metrics for alerts. `watch`: measures the steps."""

    def __init__(self, settings: TrainerSettings, sinks: Sinks, speed: Speed) -> None:
        self._settings = settings
        self.speed = speed
        self._sinks = sinks
        self._ranges = RangeWatch()
        self._totals = RunTotals()
        self._rollouts: StepRollouts | None = None
        self.watch = StepWatch(enter=sinks.enter)

    def record(self, outcome: StepOutcome) -> None:
        record = step_record(outcome, self._settings.steps)
        # The log is read by people: the same metrics by lag are for plots.
        shown = {name: value for name, value in record.items() if not name.startswith("lag_")}
        log.info("step.finished", **shown)
        self._sinks.write(record)
        batch, epoch = outcome.batch, outcome.published.version.epoch
        self._rollouts = StepRollouts(
            outcome.trained.step + 1, epoch, batch, outcome.gradients.tokens
        )
        self._ranges.look(record)
        self._totals.add(record, outcome.published.is_served)

    def write_rollouts(self) -> None:
        """Those of the last record, before the next one. See `ProvenanceLog.write`."""
        if self._rollouts is not None:
            self._sinks.write_rollouts(self._rollouts)
            self._rollouts = None

    def record_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """To the experiment trackers; the run that evaluates keeps its own file.

        Args: step: steps that the evaluated weights include
        """
        for write in self._sinks.evaluations:
            write({**metrics, "step": step})

    def report_times(self) -> None:
        """Write the summary to standard output and to benchmark.json."""
        settings = self._settings
        summary = self._totals.summary(settings.sync.mode, servers_of(settings), settings.save_path)
        summary.write(settings.save_path)
        sys.stdout.write(f"\n{summary}")


def trim_records(path: Path, steps_taken: int) -> None:
    """Keep one record for each step up to `steps_taken`. A killed trainer may have taken later
    steps, which the resumed run repeats. Broken lines are removed too.

    Raises:
        CheckpointNotSaved: the file could not be rewritten; it is unchanged.
    """
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    steps = {step: line for line in lines if (step := _step_of(line)) is not None}
    kept = [line for step, line in sorted(steps.items()) if step <= steps_taken]
    if kept != lines:
        write_whole(path.resolve(), "".join(kept))


def rotate_records(path: Path) -> None:
    """Rename another run's file to `path.1`, or to the next free number.

    Raises:
        CheckpointNotSaved: it cannot be renamed.
    """
    if not path.is_file() or not path.stat().st_size:
        return
    aside = free_name(path)
    try:
        path.rename(aside)
    except OSError as error:
        raise CheckpointNotSaved(
            f"{path} contains records of another run and cannot be renamed: {error}; move "
            "this file away, or pass another --metrics-file"
        ) from error
    log.info("metrics_file.renamed", file=str(path), renamed_to=str(aside))


def _step_of(line: str) -> int | None:
    """None if the line is not a complete record: its writer was killed, or the disk was full."""
    try:
        step = json.loads(line)["step"] if line.endswith("\n") else None
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def append_record(path: Path, record: Record) -> None:
    """Append one complete JSON line, so that other processes can follow the file.

    Raises:
        ValueError: a value is NaN or infinite.
        MetricsNotWritten: the file could not be written, e.g. the disk is full.
    """
    line = json.dumps(record, allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        raise MetricsNotWritten(
            f"--metrics-file {path}: {error}; free disk space, or choose another file, then start "
            "the trainer again"
        ) from error


def begin_records(settings: TrainerSettings, resumed_step: int | None) -> None:
    """Prepare the files of metrics and rollouts: those of another run are put aside, and records of
    steps that a checkpoint lacks are removed.

    Args:
        resumed_step: see `recorded_steps`; None for a new run
    """
    if settings.metrics_file is not None:
        if resumed_step is None:
            rotate_records(settings.metrics_file)
        else:
            trim_records(settings.metrics_file, resumed_step)
    prepare_rollouts(settings, resumed_step)


STAGE_FILE = "stage.json"
_BYTES = 128
"""Of the content, with the spaces behind it."""


class StageFile(ClosesOnExit):
    """Keeps `stage.json` in a directory: `{"stage": "compute", "since": 1764201600.0, "pid": 7}`.

    It is neither synced nor required: a disk that fails never ends the run. The content is
    overwritten, because a new file in its place makes ext4 write to the disk: 2 ms instead of
    10 us. A reader sees the content before or after such a small write.

    Args: clock: Unix time in seconds
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._file: int | None = None
        with contextlib.suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            self._file = os.open(directory / STAGE_FILE, os.O_WRONLY | os.O_CREAT, 0o644)

    def enter(self, stage: Stage) -> None:
        """A stage of a step begins."""
        if self._file is None:
            return
        content = json.dumps({"stage": stage, "since": self._clock(), "pid": os.getpid()})
        with contextlib.suppress(OSError):
            os.pwrite(self._file, content.ljust(_BYTES).encode(), 0)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
