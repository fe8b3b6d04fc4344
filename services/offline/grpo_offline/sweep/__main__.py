"""`grpo-sweep RUN`: the table of a sweep."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_core.errors import GrpoError
from grpo_offline.sweep.report import report_sweep


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="grpo-sweep", description="Ranks the jobs of a sweep of grpo-offline -m."
    )
    parser.add_argument("run", type=Path, help="Directory of the sweep, below multirun/")
    try:
        report_sweep(parser.parse_args(argv).run)
    except GrpoError as error:
        sys.stderr.write(f"grpo-sweep: {error}\n")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
