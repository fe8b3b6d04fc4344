"""The stack on one GPU, with a model of random weights: `python -m benchmarks.gpu --size 0.5b`.

Each figure is printed, and written into the table of its part, as soon as it is known. Sizes are
measured one by one, each in less than ten minutes.
"""

from __future__ import annotations

import shlex
import signal
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import structlog
from pydantic import Field

from grpo_core.errors import GrpoError
from grpo_core.logs import configure_logging
from grpo_core.settings import Command, CommandSettings, load_settings

if TYPE_CHECKING:
    from benchmarks.gpu_bench.bench import Deadline, GpuBench

PartName = Literal["train", "restart", "decode", "publish", "demo"]
PARTS: tuple[PartName, ...] = get_args(PartName)
"""In this order: those that matter most first."""
log = structlog.get_logger()


class GpuBenchSettings(CommandSettings):
    """Measure training, restarts, decoding, publications and a demo on one GPU, with a model of
    random weights."""

    command: ClassVar[Command] = Command(prog="bench-gpu", env_prefix="BENCH_GPU_")

    size: Literal["tiny", "0.5b", "1.5b", "7b"] = Field(
        description="Shape of the model; tiny runs on a CPU too"
    )
    parts: list[PartName] = Field(list(PARTS), min_length=1, description="What to measure")
    seconds_budget: float = Field(
        480.0, gt=0, description="Seconds after which only the least number of rounds is measured"
    )
    results: Path | None = Field(
        None,
        description="Markdown file whose sections are replaced, one for each part; pages of the "
        "demo come to lie beside it",
    )
    directory: Path | None = Field(
        None,
        description="Directory that keeps the model and vLLM's compiled code for the next run "
        "(default: a temporary one)",
    )
    vllm_flags: str = Field("", description="More flags of every server, as one string")
    commit: str | None = Field(
        None, description="The measured commit, on a host without git (default: git's HEAD)"
    )


def main() -> None:
    settings = load_settings(GpuBenchSettings, sys.argv[1:])
    configure_logging("bench-gpu")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the servers

    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as scratch:
        failed = _run(settings, Path(scratch))
    raise SystemExit(f"failed: {', '.join(failed)}" if failed else 0)


def _run(settings: GpuBenchSettings, scratch: Path) -> list[PartName]:
    """Measure and report; returns the parts that failed."""
    import torch

    from benchmarks.gpu_bench.bench import Deadline, GpuBench, facts, measure_rates
    from benchmarks.gpu_bench.host import commit
    from benchmarks.gpu_bench.models import work_on
    from benchmarks.gpu_bench.training import free_memory

    on_gpu = torch.cuda.is_available()
    if not on_gpu and settings.size != "tiny":
        raise SystemExit(f"--size {settings.size} needs a GPU; --size tiny runs on a CPU too")
    if not on_gpu:
        torch.set_num_threads(1)  # the servers use the other cores
    end = Deadline(time.monotonic() + settings.seconds_budget)
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    rates = measure_rates(device)
    free_memory()
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    about = [
        f"{date}. Commit {settings.commit or commit()}, `{_command(settings)}`. Medians (lowest to "
        "highest); *limit* is the limit of the hardware, by rates measured in the same run.",
        "",
        *facts(rates, device),
    ]
    kept = (settings.directory or scratch).absolute()
    work, flags = work_on(settings.size, on_gpu), shlex.split(settings.vllm_flags)
    parts = [part for part in PARTS if part in settings.parts]
    with GpuBench(
        settings.size, work, device, rates, about, scratch, kept, flags, settings.results
    ) as bench:
        return [
            part
            for number, part in enumerate(parts)
            if not _measure(bench, part, end.share(len(parts) - number))
        ]


def _measure(bench: GpuBench, part: PartName, until: Deadline) -> bool:
    """Measure one part. Returns False, with the error in the log, if it failed: the others are
    measured too."""
    from benchmarks.gpu_bench import runs, serving, training

    measures = {
        "train": training.measure_training,
        "restart": runs.measure_restarts,
        "decode": serving.measure_decode,
        "publish": serving.measure_publications,
        "demo": runs.measure_demo,
    }
    log.info("measuring", part=part, seconds=round(until.left_s))
    bench.begin(f"GPU: {bench.size if bench.on_gpu else f'{bench.size} on a CPU'}, {part}")
    try:
        measures[part](bench, until)
    except (GrpoError, RuntimeError, OSError, ImportError, ValueError, KeyError) as error:
        log.exception("a part failed", part=part)
        bench.leave_out(part, f"{type(error).__name__}: {error}")
        return False
    finally:
        training.free_memory()
    return True


def _command(settings: GpuBenchSettings) -> str:
    """Only options that change what is measured."""
    words = ["python", "-m", "benchmarks.gpu", "--size", settings.size]
    words += ["--parts", *settings.parts] if settings.parts != list(PARTS) else []
    words += ["--seconds-budget", f"{settings.seconds_budget:g}"]
    words += ["--vllm-flags", settings.vllm_flags] if settings.vllm_flags else []
    return shlex.join(words)


if __name__ == "__main__":
    main()
