"""The stack on one GPU, with a model of random weights: `python -m benchmarks.gpu --size 0.5b`.

Each figure is printed, and appended to a file, as soon as it is known: a run that is cut off has
said all that it found. Sizes are measured one by one, each in less than ten minutes.
"""

from __future__ import annotations

import signal
import sys

import structlog

from benchmarks.gpu_bench.settings import GpuBenchSettings
from grpo_core.errors import GrpoError
from grpo_core.logs import configure_logging
from grpo_core.settings import load_settings

EXIT_FAILED = 1
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main() -> None:
    settings = load_settings(GpuBenchSettings, sys.argv[1:])
    configure_logging("bench-gpu")
    for number in _SIGNALS:
        signal.signal(number, _stop)

    from benchmarks.gpu_bench.run import run

    try:
        is_whole = run(settings)
    except GrpoError as error:
        structlog.get_logger().error(type(error).__name__, reason=str(error))
        raise SystemExit(EXIT_FAILED) from None
    raise SystemExit(0 if is_whole else EXIT_FAILED)


def _stop(number: int, _frame: object) -> None:
    """Unwind, which ends the servers; a second signal does not disturb that."""
    for ignored in _SIGNALS:
        signal.signal(ignored, signal.SIG_IGN)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
