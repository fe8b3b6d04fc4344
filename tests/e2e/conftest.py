"""The run that README.md's section "Your own reward" starts, made short."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.demo_run import DemoRun, readme_flags
from tests.e2e.planted_run import PlantedRun, planted_run

SHORT_STEPS = 20


@pytest.fixture(scope="session")
def own_reward_run_with_secrets(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Path,  # noqa: ARG001
) -> PlantedRun:
    """The command finds `tiny_model` in the cache."""
    directory = tmp_path_factory.mktemp("own-reward") / "run"
    return planted_run(directory, *readme_flags(), "--steps", str(SHORT_STEPS))


@pytest.fixture(scope="session")
def own_reward_run(own_reward_run_with_secrets: PlantedRun) -> DemoRun:
    return own_reward_run_with_secrets.run
