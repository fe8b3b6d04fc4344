"""One run for the tests of a mode; killed processes are restarted before the next test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.whole_run.commands import SHARED, Commands, Shape
from tests.whole_run.rig import Rig


@pytest.fixture(scope="session")
def run_in(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Rig]]:
    """The run in this mode. Only one run exists at a time, so a run in another mode ends."""
    runs: list[Rig] = []

    def run(mode: str) -> Rig:
        if not runs or runs[-1].mode != mode:
            stack.close()
            commands = Commands(tmp_path_factory.mktemp("run"), tiny_model, Shape(mode))
            runs.append(stack.enter_context(Rig(commands)))
        return runs[-1]

    with ExitStack() as stack:
        yield run


@pytest.fixture
def rig(request: pytest.FixtureRequest, run_in: Callable[[str], Rig]) -> Rig:
    """Check that every process is alive and that a step was trained since the last fault."""
    rig = run_in(getattr(request, "param", SHARED))
    rig.start_what_is_dead()
    rig.wait_for_steps(1)
    return rig
