#!/usr/bin/env python3
"""One iteration and one evaluation with a small model in this process: `python smoke_test.py`.

No server, no GPU and no network are needed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from grpo_core.cpu import share_cores
from grpo_offline.keys import OfflineKeys
from grpo_offline.run_files import RunFiles
from grpo_offline.screen import Screen

SHOWN = 4


def main() -> None:
    share_cores()  # before torch is imported
    from grpo_offline.loop import run_offline
    from grpo_tiny_model.model import ensure_tiny_model

    model = str(ensure_tiny_model())
    keys = OfflineKeys.model_validate(
        {
            "model": {"train_id": model, "ref_id": model, "device": "cpu"},
            "generation": {"backend": "local", "max_new_tokens": 8},
            "eval": {"backend": "local", "max_new_tokens": 8, "num_ids": 8},
            "train": {"iterations": 1, "lr": 1e-4},
        }
    )
    with tempfile.TemporaryDirectory() as directory:
        run_offline(keys, Path(directory), Screen())
        files = RunFiles(Path(directory))
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
