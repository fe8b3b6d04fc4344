"""One run for the tests of a mode; what a test killed for good is started again before the next."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.commands import SHARED
from tests.faults.rig import Rig


@pytest.fixture(scope="session")
def run_in(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Rig]]:
    """The run in this mode. There is one at a time, so that of another mode ends."""
    runs: list[Rig] = []

    def run(mode: str) -> Rig:
        if not runs or runs[-1].mode != mode:
            stack.close()
            # Unix socket paths hold 107 bytes; pytest's directories may be longer than that.
            sockets = stack.enter_context(tempfile.TemporaryDirectory(prefix="grpo-"))
            runs.append(Rig(tmp_path_factory.mktemp("run"), Path(sockets), tiny_model, mode))
            stack.callback(runs[-1].close)
        return runs[-1]

    with ExitStack() as stack:
        yield run


@pytest.fixture
def rig(request: pytest.FixtureRequest, run_in: Callable[[str], Rig]) -> Rig:
    """Every process lives, and a step was trained since the last fault."""
    rig = run_in(getattr(request, "param", SHARED))
    rig.start_what_is_dead()
    rig.wait_for_steps(1)
    return rig
