"""One run for the whole suite; what a test killed for good is started again before the next."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.rig import ORDER, Rig


@pytest.fixture(scope="session")
def whole_run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    # Unix socket paths hold 107 bytes; pytest's directories may be longer than that.
    with tempfile.TemporaryDirectory(prefix="grpo-") as sockets:
        rig = Rig(tmp_path_factory.mktemp("faults"), Path(sockets), tiny_model)
        try:
            yield rig
        finally:
            rig.close()


@pytest.fixture
def rig(whole_run: Rig) -> Rig:
    """Every process lives, and a step was trained since the last fault."""
    for name in ORDER:
        if not whole_run.is_alive(name):
            whole_run.start(name)
    whole_run.wait_for_steps(1)
    return whole_run
