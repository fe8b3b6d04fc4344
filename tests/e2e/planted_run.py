"""Runs the demo with a secret in every variable that may hold one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from grpo_runs.process.ports import free_port
from tests.e2e.demo_run import DemoRun, run_demo
from tests.support.planted import planted, watched_command_lines

NAMES = ("RUN_API_TOKEN", "VLLM_API_KEY", "TEACHER_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_WANDB_KEY_CHARACTERS = 40


@dataclass(frozen=True)
class PlantedRun:
    """command_lines: of all processes of this machine while the run went on."""

    run: DemoRun
    secrets: Mapping[str, str]
    command_lines: list[tuple[str, bytes]]


def planted_run(directory: Path, *flags: str) -> PlantedRun:
    """Files of trackers are beside the directory."""
    secrets = planted(*NAMES)
    secrets["WANDB_API_KEY"] = "planted7f3a91".ljust(_WANDB_KEY_CHARACTERS, "0")
    hook = planted("HOOK")
    beside = directory.parent
    places = {"WANDB_MODE": "offline", "WANDB_DIR": str(beside), "TRACKIO_DIR": str(beside / "db")}
    places["GRPO_DEMO_ON_END"] = f"http://127.0.0.1:{free_port()}/{hook['HOOK']}"
    with watched_command_lines() as seen:
        run = run_demo(directory, *flags, environment=secrets | places)
    redis = {"Redis password": (directory / "redis" / "password").read_text()}
    return PlantedRun(run, secrets | hook | redis, seen())
