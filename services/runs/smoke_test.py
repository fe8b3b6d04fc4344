#!/usr/bin/env python3
"""One iteration and one evaluation with a small model in this process: `python smoke_test.py`.

No server, no GPU and no network are needed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from grpo_core.cpu import prepare_cpu
from run_tests import run_small

SHOWN = 4


def main() -> None:
    prepare_cpu()  # before torch is imported
    with tempfile.TemporaryDirectory() as directory:
        files = run_small(Path(directory), iterations=1, evaluated=8)
        train = json.loads(files.train(0).read_text(), parse_float=_rounded)
        evaluation = json.loads(files.evaluation(0).read_text(), parse_float=_rounded)
    sys.stdout.write(f"Train metrics: {train}\nEval metrics: {evaluation}\n")


def _rounded(number: str) -> float:
    return round(float(number), SHOWN)


if __name__ == "__main__":
    main()
