"""Makes `tests/upgrade/golden.tar.xz`: a run of this version, as a kill of everything leaves it.

    python -m tests.upgrade.make_golden

`tests/integration/test_upgrade.py` of later versions resumes it. Run this in the tree of a release,
before the first change that the release does not have.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import httpx
import torch

from grpo_core.protocol import VERSION
from grpo_runs.process.ports import free_port
from grpo_tiny_model.model import build_model, build_tokenizer
from grpo_tiny_model.spec import TinySpec
from tests.fixtures.run_api import start_run_api
from tests.support.redis_server import start_redis
from tests.upgrade.run import (
    DEMO,
    FACTS,
    MODEL,
    REDIS,
    RUN_ID,
    SAVED,
    group,
    train,
    trainer_settings,
)

GOLDEN = Path(__file__).parent / "golden.tar.xz"
STEPS = 3
ENVIRONMENT = {"max_token_length": 16, "desired_name": "sums", "weight": 1.0, "group_size": 2}
QUEUED = range(1, 14)
PART = 100


def make_model(directory: Path) -> None:
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    recipe = TinySpec(layers=1, width=16, max_positions=64)
    build_model(len(tokenizer), recipe).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def make_run(directory: Path) -> None:
    """A checkpoint with step 2 and batch 2, the leased batches 3 and 4, a queue, an environment
    and half a group."""
    port = free_port()
    make_model(directory / MODEL)
    redis = start_redis(port, directory / REDIS)
    api = start_run_api(f"redis://127.0.0.1:{port}/0", directory, run_id=RUN_ID)
    facts: dict[str, Any] = {"version": VERSION, "commit": _commit(), "part": PART}
    try:
        steps = train(api.url, steps=100)
        with httpx.Client(base_url=api.url) as http:
            registration = trainer_settings(api.url, STEPS).registration(first_step=0)
            http.post("/register", json=registration.model_dump()).raise_for_status()
            http.get("/batch").raise_for_status()  # environments wait for the first request
            enrolled = http.post("/register-env", json=ENVIRONMENT).raise_for_status().json()
            facts["env_id"] = enrolled["env_id"]
            for marker in QUEUED:
                http.post("/scored_data", json=group(marker)).raise_for_status()
            part = group(PART, size=1, env_id=enrolled["env_id"])
            http.post("/scored_data", json=part).raise_for_status()
            for position in steps:
                if position.step == STEPS:
                    # as if killed: the trainer may not save or disconnect
                    os.sync()
                    shutil.copytree(directory / SAVED, directory / "kept")
                    break
            facts["status"] = http.get("/status").raise_for_status().json()
    finally:
        redis.kill()
        api.process.kill()
    (directory / FACTS).write_text(json.dumps(facts, indent=1))
    (directory / DEMO).write_text(demo_options())


def demo_options() -> str:
    """As `config.yaml` of a run has them, which `--resume` reads."""
    command = [sys.executable, "-m", "grpo_runs", "--dry-run"]
    return subprocess.run(command, text=True, capture_output=True, check=True).stdout


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--tags"]
    root = Path(__file__).parents[2]
    return subprocess.run(command, cwd=root, text=True, capture_output=True).stdout.strip()


def pack(directory: Path, target: Path) -> None:
    with tarfile.open(target, "w:xz", preset=9) as packed:
        for source, name in ((MODEL, MODEL), ("kept", SAVED), (FACTS, FACTS), (DEMO, DEMO)):
            packed.add(directory / source, name)
        packed.add(directory / REDIS / "appendonly.aof", f"{REDIS}/appendonly.aof")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make_run(Path(folder))
        pack(Path(folder), GOLDEN)
        os.chdir("/")


if __name__ == "__main__":
    main()
