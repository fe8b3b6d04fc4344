"""Where the server shares its weights: `vllm_bridge_config.json`, which it writes and the trainer
finds, and the places of the socket. `inference/test_shared_weights.py` tests what that grants."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from grpo_core.settings import load_settings
from grpo_core.tree.server import ServerSettings
from grpo_core.weights import bridge_config
from grpo_core.weights.bridge_config import (
    FILE_NAME,
    BridgeConfig,
    BridgeConfigNotFound,
    BridgeConfigUnwritable,
    find_bridge_config,
    write_bridge_config,
)
from grpo_core.weights.shared_memory import ParameterMapping
from grpo_vllm.engine.control import EngineControl
from grpo_vllm.supervisor.main import supervise
from grpo_vllm.weights.socket_server import (
    UnsafeSocketDirectory,
    bridge_config_written,
    serve_weights,
)
from grpo_vllm.weights.write_lease import WeightBridge
from tests.unit.vllm.fake_engine import FakeEngine

NOBODY_UID = 65534
PLACES = ("explicit", "logs", "cwd", "common")
"""The paths in the order in which a trainer tries them."""


MAPPING = ParameterMapping(
    offset=256, nbytes=32, shape=(2, 4), dtype="float32", vllm_name="qkv_proj", slice=(4, 6)
)


def config(generation: str) -> BridgeConfig:
    return BridgeConfig(
        **{"model": "tiny", "dtype": "float32", "device": "cpu", "total_bytes": 512},
        generation=generation,
        weights_socket=Path("/run/weights.sock"),
        param_mappings={"k_proj": MAPPING, "norm": MAPPING.model_copy(update={"slice": None})},
    )


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The working directory and the directory shared by users belong to this test only."""
    for place in PLACES:
        (tmp_path / place).mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setattr(bridge_config, "COMMON_DIRECTORY", tmp_path / "common")
    return tmp_path


def find(root: Path, generation: str | None) -> BridgeConfig:
    explicit, environment = root / "explicit" / FILE_NAME, {"LOGDIR": str(root / "logs")}
    return find_bridge_config(explicit, environment, generation)


def test_places_are_looked_at_in_order_for_the_wanted_server(root: Path) -> None:
    for place in reversed(PLACES):
        write_bridge_config(config(place), root / place / FILE_NAME)
        assert find(root, None) == config(place)
    for place in PLACES:
        assert find(root, place) == config(place)
    (root / "logs" / FILE_NAME).write_text("{")
    assert find(root, "common") == config("common")


def test_the_error_lists_every_path_and_what_was_wrong_there(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bridge_config(config("old"), root / "logs" / FILE_NAME)
    (root / "cwd" / FILE_NAME).write_text('{"model": "m", "param_mappings": {}}')
    write_bridge_config(config("g1"), root / "common" / FILE_NAME)
    others = root / "common" / FILE_NAME
    if os.geteuid() == 0:  # only root can give a file away
        os.chown(others, NOBODY_UID, -1, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: NOBODY_UID)
    with pytest.raises(BridgeConfigNotFound) as raised:
        find(root, "g1")
    _, *lines, advice = str(raised.value).splitlines()
    problems = {
        "explicit": "the file does not exist",
        "logs": "of generation old, which another or an earlier engine shared",
        "cwd": "the file has invalid fields: dtype: Field required",
        "common": "the file cannot be read: ",
    }
    for line, (place, problem) in zip(lines, problems.items(), strict=True):
        assert line.startswith(f"  {root / place / FILE_NAME}: {problem}")
    assert "--share-weights" in advice


def test_the_file_is_private_and_not_written_where_others_could_replace_it(root: Path) -> None:
    path = root / "new" / "directory" / FILE_NAME
    write_bridge_config(config("g1"), path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in path.parent.iterdir()] == [FILE_NAME]
    path.parent.chmod(0o777)
    with pytest.raises(BridgeConfigUnwritable, match="every user can replace the files"):
        write_bridge_config(config("g1"), path)


def test_a_server_removes_its_own_file_and_no_other(root: Path) -> None:
    path = root / "explicit" / FILE_NAME
    with bridge_config_written(config("first"), path, required=True):
        assert find(root, "first")
        with bridge_config_written(config("second"), path, required=True):
            assert find(root, "second")
        assert not path.exists()
        write_bridge_config(config("third"), path)
    assert find(root, "third")


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
        supervise(load_settings(ServerSettings, flags), flags, "no.engine")
