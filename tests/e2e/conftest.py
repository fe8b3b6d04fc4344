"""The run that README.md's section "Your own reward" starts, made short."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.demo_run import DemoRun, readme_flags, run_demo

SHORT_STEPS = 30


@pytest.fixture(scope="session")
def own_reward_run(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Path,  # noqa: ARG001
) -> DemoRun:
    """The command finds `tiny_model` in the cache."""
    directory = tmp_path_factory.mktemp("own-reward") / "run"
    return run_demo(directory, *readme_flags(), "--steps", str(SHORT_STEPS))
