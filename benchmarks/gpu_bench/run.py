"""One run: what every part needs is made, the parts are measured, the results are written."""

from __future__ import annotations

import contextlib
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import structlog
import torch

from benchmarks.gpu_bench.bench import (
    TIME_IS_UP,
    GpuBench,
    Rates,
    commit,
    description,
    give_memory_back,
    measure_rates,
    used_bytes,
)
from benchmarks.gpu_bench.report import GpuRecorder, GpuRunFacts, part_tables, write_results
from benchmarks.gpu_bench.servers import (
    LORA_RANK,
    GpuServerOptions,
    ServerPool,
    make_random_model,
    write_random_adapter,
)
from benchmarks.gpu_bench.serving import measure_decode, measure_swaps
from benchmarks.gpu_bench.settings import (
    PARTS,
    SHAPES,
    Budget,
    GpuBenchSettings,
    GpuDeadline,
    GpuWorkload,
    PartName,
    workload,
)
from benchmarks.gpu_bench.sharing import (
    measure_memory,
    measure_placement,
    measure_publications,
)
from benchmarks.gpu_bench.training import measure_training
from grpo_core.errors import GrpoError

log = structlog.get_logger()

MIN_LEFT_S = 5.0
"""With less, a part is not begun."""
_SHOWN_CHARS = 500
_MEASURES: dict[PartName, Callable[[GpuBench, GpuDeadline], None]] = {
    "decode": measure_decode,
    "swap": measure_swaps,
    "memory": measure_memory,
    "publish": measure_publications,
    "placement": measure_placement,
    "train": measure_training,
}


class NeedsGpu(GrpoError):
    """Nobody would wait for a model of that size on a CPU."""


def run(settings: GpuBenchSettings) -> bool:
    """Measure, print and write; returns whether every part did what it could.

    Raises:
        NeedsGpu: there is none, and the size is not tiny.
    """
    budget = Budget(settings.seconds_budget)
    recorder = GpuRecorder(settings.figures, sys.stdout)
    with (
        _directory(settings) as directory,
        _prepared(settings, directory, recorder, budget) as bench,
    ):
        try:
            return _measure(settings, bench, budget)
        finally:
            _conclude(settings, recorder)


def _measure(settings: GpuBenchSettings, bench: GpuBench, budget: Budget) -> bool:
    parts = [part for part in PARTS if part in settings.parts]
    is_whole = True
    for number, part in enumerate(parts):
        if budget.end.left_s < MIN_LEFT_S:
            bench.leave_out(part, TIME_IS_UP)
        else:
            is_whole &= _measure_one(bench, part, budget.deadline(parts[number:]))
    return is_whole


def _measure_one(bench: GpuBench, part: PartName, deadline: GpuDeadline) -> bool:
    """What breaks one part leaves the others as they are."""
    log.info("measuring", part=part, seconds=round(deadline.left_s))
    try:
        _MEASURES[part](bench, deadline)
    except (GrpoError, RuntimeError, OSError, ImportError) as error:
        log.exception("a part failed", part=part)
        reason = f"failed: {type(error).__name__}: {error}"
        bench.leave_out(part, reason[:_SHOWN_CHARS])
        return False
    except SystemExit:  # of a signal
        bench.leave_out(part, "interrupted", "the rest")
        raise
    finally:
        give_memory_back()
    return True


def _conclude(settings: GpuBenchSettings, recorder: GpuRecorder) -> None:
    facts = next(record for record in recorder.records if isinstance(record, GpuRunFacts))
    for part, lines in part_tables(facts, recorder.records).items():
        sys.stdout.write("\n".join(["", f"### {facts.size}: {part}", "", *lines, ""]))
    sys.stdout.flush()
    if settings.results is not None:
        write_results(settings.results, recorder.records)


@contextlib.contextmanager
def _directory(settings: GpuBenchSettings) -> Iterator[Path]:
    if settings.directory is not None:
        settings.directory.mkdir(parents=True, exist_ok=True)
        yield settings.directory.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as name:
        yield Path(name)


@contextlib.contextmanager
def _prepared(
    settings: GpuBenchSettings, directory: Path, recorder: GpuRecorder, budget: Budget
) -> Iterator[GpuBench]:
    """The rates are measured, the model is made, no server is up yet."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and settings.size != "tiny":
        raise NeedsGpu(f"--size {settings.size} needs a GPU; --size tiny runs on a CPU too")
    if device.type == "cpu":
        torch.set_num_threads(1)  # the other cores are the servers'
    rates = measure_rates(device)
    recorder.add(_facts(settings, rates, device))
    give_memory_back()
    used_before = used_bytes() if device.type == "cuda" else 0
    shape, work = SHAPES[settings.size], _workload(settings, device)
    model = directory / "models" / f"{settings.size}-{work.dtype}"
    make_random_model(settings.size, model, getattr(torch, work.dtype))
    with tempfile.TemporaryDirectory(prefix="adapters-", dir=directory) as adapters:
        options = GpuServerOptions(
            model=model,
            dtype=work.dtype,
            engine_flags=(
                *work.engine_flags,
                *("--kv-cache-memory-bytes", str(work.cache_bytes)),
                *shlex.split(settings.vllm_flags),
            ),
            directory=directory,
            first_adapter=write_random_adapter(shape, LORA_RANK, Path(adapters) / "first", seed=0),
            on_gpu=device.type == "cuda",
        )
        with ServerPool(options) as pool:
            yield GpuBench(
                size=settings.size,
                shape=shape,
                workload=work,
                device=device,
                rates=rates,
                recorder=recorder,
                pool=pool,
                adapters=Path(adapters),
                model=model,
                used_before=used_before,
                end=budget.end,
            )


def _workload(settings: GpuBenchSettings, device: torch.device) -> GpuWorkload:
    shape, on_gpu = SHAPES[settings.size], device.type == "cuda"
    return workload(settings.size, shape.kv_bytes_per_token(torch.bfloat16.itemsize), on_gpu)


def _command(settings: GpuBenchSettings) -> str:
    """What decides what is measured; not where this machine keeps its files."""
    words = ["python", "-m", "benchmarks.gpu", "--size", settings.size]
    words += ["--parts", ",".join(settings.parts)] if settings.parts != list(PARTS) else []
    words += ["--seconds-budget", f"{settings.seconds_budget:g}"]
    words += ["--vllm-flags", settings.vllm_flags] if settings.vllm_flags else []
    return shlex.join(words)


def _facts(settings: GpuBenchSettings, rates: Rates, device: torch.device) -> GpuRunFacts:
    """Right after the device has worked: its clocks are among them."""
    return GpuRunFacts(
        size=settings.size,
        on_gpu=device.type == "cuda",
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        commit=settings.commit or commit(),
        command=_command(settings),
        measured_on=description(rates, device),
    )
