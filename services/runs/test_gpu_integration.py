#!/usr/bin/env python3
"""Four tests against a running vLLM server: `python test_gpu_integration.py [URL]`.

The server serves the model that is trained, for example

    vllm-api-server --model Qwen/Qwen2.5-0.5B-Instruct --port 30000 --share-weights --redis-url none

Exit status 1 if a test fails.
"""

from __future__ import annotations

import json
import sys
import tempfile
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from grpo_runs.offline.run_files import RunFiles
from grpo_runs.offline.screen import OfflineScreen
from run_tests import main, run_with

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"
ITERATIONS = 2
HELP = "start vllm-api-server there, as the head of this file says"


def served() -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"{URL}/v1/models", timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)["data"][0]
    except OSError as error:
        raise SystemExit(f"no server at {URL} ({error}); {HELP}") from None
    return found


@cache
def run() -> RunFiles:
    """A whole run, which the tests look at."""
    model, room = served().get("root") or served()["id"], served().get("max_model_len") or 2048
    limits = {"seq_len": min(2048, room)}
    content = {
        "model": {"train_id": model, "ref_id": model},
        "generation": {"base_url": URL, "max_new_tokens": 8},
        "eval": {"base_url": URL, "max_new_tokens": 8, "num_ids": 4},
        "train": {"iterations": ITERATIONS},
        "grpo": limits,
        "env_server": limits,
    }
    return run_with(content, Path(tempfile.mkdtemp(prefix="grpo-offline-")), OfflineScreen())


def test_rollouts_of_the_server() -> None:
    for number in range(ITERATIONS):
        groups = run().read_groups(number) or []
        assert [group.size for group in groups] == [4] * 4
        assert all(mask >= 0 for group in groups for mask in [group.masks[0][-1]])


def test_training_on_them() -> None:
    for number in range(ITERATIONS):
        record = json.loads(run().train(number).read_text())
        parts = record["loss_pg"] + record["loss_kl"] + record["loss_entropy"]
        assert abs(record["loss_total"] - parts) < 1e-6
        assert record["grad_norm"] >= 0


def test_evaluation_by_the_server() -> None:
    for number in range(ITERATIONS):
        record = json.loads(run().evaluation(number).read_text())
        assert 0 <= record["pass@1"] <= 1
        assert record["items"] == 4


def test_whole_iteration() -> None:
    """New rollouts come from the newest weights, and the server's logprobs are the trainer's."""
    first, second = (json.loads(run().train(number).read_text()) for number in range(ITERATIONS))
    if not first["frozen"]:
        assert second["served_step"] == first["trained_step"]
        assert second["failed_checks"] == 0
    assert run().model.is_dir()


def device() -> str:
    import torch

    config = yaml.safe_load((run().path / "config.yaml").read_text())
    wanted = str(config.get("device", "auto"))
    on_gpu = torch.cuda.is_available() and wanted != "cpu"
    return torch.cuda.get_device_name() if on_gpu else "CPU"


if __name__ == "__main__":
    main(globals(), "passed", lambda: f"trained on: {device()}\n")
