"""Allowed places of the weight socket. `inference/test_shared_weights.py` tests what it grants."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from grpo_vllm.engine.control import EngineControl
from grpo_vllm.settings import load_server_settings
from grpo_vllm.supervisor.main import supervise
from grpo_vllm.weights.socket_server import UnsafeSocketDirectory, serve_weights
from grpo_vllm.weights.write_lease import WeightBridge
from tests.unit.vllm.fake_engine import FakeEngine

NO_WEIGHTS: Any = None
"""An engine that is never called, because no trainer connects."""


async def served_at(path: Path) -> int:
    """The mode of the socket's directory while the socket is open."""
    async with serve_weights(path, NO_WEIGHTS, WeightBridge(EngineControl(FakeEngine()))):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        return stat.S_IMODE(path.parent.stat().st_mode)


async def test_its_directory_is_made_for_one_user(tmp_path: Path) -> None:
    path = tmp_path / "made" / "weights.sock"
    assert [await served_at(path) for _ in range(2)] == [0o700, 0o700]


@pytest.mark.parametrize(("uid", "mode", "told"), [(None, 0o750, "0750"), (4321, 0o700, "4321")])
async def test_a_directory_that_others_may_enter_or_own_is_refused_by_name(
    uid: int | None, mode: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "theirs" / "weights.sock"
    path.parent.mkdir()
    path.parent.chmod(mode)
    if uid is not None:
        monkeypatch.setattr("os.getuid", lambda: uid)
    with pytest.raises(UnsafeSocketDirectory, match=f"{path.parent}.*{told}.*chmod 700"):
        await served_at(path)
    assert not path.exists()
    # before the engine loads anything
    flags = ["--model", "m", "--share-weights", "--weights-socket", str(path)]
    with pytest.raises(UnsafeSocketDirectory):
        supervise(load_server_settings(flags), flags, "no.engine")
