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
        train = json.loads(files.train(0).read_text())
        evaluation = json.loads(files.evaluation(0).read_text())
    sys.stdout.write(f"Train metrics: {_rounded(train)}\nEval metrics: {_rounded(evaluation)}\n")


def _rounded(metrics: dict[str, object]) -> dict[str, object]:
    return {
        name: round(value, SHOWN) if isinstance(value, float) else value
        for name, value in metrics.items()
    }


if __name__ == "__main__":
    main()
