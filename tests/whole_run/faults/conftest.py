"""One run for the tests of a mode; killed processes are restarted before the next test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.whole_run.commands import SHARED, Commands, Shape
from tests.whole_run.rig import Rig
from tests.whole_run.table import SEVERAL


@pytest.fixture(scope="session")
def run_in(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Rig]]:
    """The run of this shape. Only one run exists at a time, so a run of another shape ends."""
    runs: dict[str, Rig] = {}

    def run(shape: str) -> Rig:
        if shape not in runs:
            runs.clear()
            stack.close()
            chosen = SEVERAL.get(shape) or Shape(shape)
            commands = Commands(tmp_path_factory.mktemp("run"), tiny_model, chosen)
            runs[shape] = stack.enter_context(Rig(commands))
        return runs[shape]

    with ExitStack() as stack:
        yield run


@pytest.fixture
def rig(request: pytest.FixtureRequest, run_in: Callable[[str], Rig]) -> Rig:
    """Check that every process is alive and that a step was trained since the last fault."""
    rig = run_in(getattr(request, "param", SHARED))
    rig.start_what_is_dead()
    rig.wait_for_steps(1)
    return rig
