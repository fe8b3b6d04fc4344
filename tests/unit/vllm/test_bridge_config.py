"""`vllm_bridge_config.json`: written by the server, found by the trainer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from grpo_core import bridge_config
from grpo_core.bridge_config import (
    FILE_NAME,
    BridgeConfig,
    BridgeConfigNotFound,
    BridgeConfigUnwritable,
    find_bridge_config,
    write_bridge_config,
)
from grpo_core.weight_manifest import ParameterMapping
from grpo_vllm.bridge_file import announced

NOBODY_UID = 65534


def config(generation: str = "g1") -> BridgeConfig:
    mapping = ParameterMapping(
        offset=256, nbytes=32, shape=(2, 4), dtype="float32", vllm_name="qkv_proj", slice=(4, 6)
    )
    return BridgeConfig(
        model="tiny",
        dtype="float32",
        generation=generation,
        weights_socket=Path("/run/weights.sock"),
        total_bytes=512,
        device="cpu",
        param_mappings={"k_proj": mapping, "norm": mapping.model_copy(update={"slice": None})},
    )


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The working directory and the directory that users share are this test's own."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setattr(bridge_config, "COMMON_DIRECTORY", tmp_path / "common")


def find(
    tmp_path: Path, explicit: Path | None = None, generation: str | None = "g1"
) -> BridgeConfig:
    return find_bridge_config(explicit, {"LOGDIR": str(tmp_path / "logs")}, generation)


@pytest.mark.parametrize("place", ["explicit", "logs", "cwd", "common"])
def test_it_is_found_in_every_place(tmp_path: Path, place: str) -> None:
    write_bridge_config(config(), tmp_path / place / FILE_NAME)
    assert find(tmp_path, tmp_path / "explicit" / FILE_NAME) == config()


def test_places_are_looked_at_in_order(tmp_path: Path) -> None:
    for generation in ("common", "cwd", "logs", "explicit"):
        write_bridge_config(config(generation), tmp_path / generation / FILE_NAME)
        explicit = tmp_path / "explicit" / FILE_NAME
        assert find(tmp_path, explicit, None).generation == generation


def test_files_of_other_servers_and_broken_ones_are_passed_over(tmp_path: Path) -> None:
    write_bridge_config(config("old"), tmp_path / "logs" / FILE_NAME)
    (tmp_path / "cwd" / FILE_NAME).write_text("{")
    write_bridge_config(config(), tmp_path / "common" / FILE_NAME)
    assert find(tmp_path) == config()


def test_the_error_lists_every_path_and_what_was_wrong_there(tmp_path: Path) -> None:
    write_bridge_config(config("old"), tmp_path / "logs" / FILE_NAME)
    (tmp_path / "cwd" / FILE_NAME).write_text('{"model": "m", "param_mappings": {}}')
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / FILE_NAME).mkdir()
    with pytest.raises(BridgeConfigNotFound) as raised:
        find(tmp_path, tmp_path / "explicit" / FILE_NAME)
    first, *lines = str(raised.value).splitlines()
    assert first == f"Could not find {FILE_NAME} of generation g1. Checked:"
    for line, place, problem in zip(
        lines,
        ("explicit", "logs", "cwd", "common"),
        (
            "no such file",
            "of generation old, another or earlier server",
            "not of this format: dtype: Field required (and 4 more)",
            "not readable: Is a directory",
        ),
        strict=False,
    ):
        assert line == f"  {tmp_path / place / FILE_NAME}: {problem}"
    assert "--share-weights" in lines[-1]
    assert "LOGDIR" in lines[-1]


def test_without_logdir_and_with_nothing_anywhere(tmp_path: Path) -> None:
    with pytest.raises(BridgeConfigNotFound, match=f"^Could not find {FILE_NAME}"):
        find_bridge_config(None, {}, None)
    assert tmp_path


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `path` another user's. Only root can; others act as if they were somebody else."""
    if os.geteuid() == 0:
        os.chown(path, NOBODY_UID, -1, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: NOBODY_UID)


def test_another_users_file_in_the_common_directory_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "common" / FILE_NAME
    write_bridge_config(config(), path)
    give_away(path, monkeypatch)
    with pytest.raises(BridgeConfigNotFound, match="not readable: belongs to another user"):
        find(tmp_path)


def test_it_is_private_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "directory" / FILE_NAME
    write_bridge_config(config(), path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [p.name for p in path.parent.iterdir()] == [FILE_NAME]


def test_a_link_in_its_place_is_replaced_and_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path = tmp_path / "cwd" / FILE_NAME
    path.symlink_to(victim)
    write_bridge_config(config(), path)
    assert victim.read_text() == "precious"
    assert not path.is_symlink()


def test_a_directory_that_is_another_users_link_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "cwd")
    give_away(link, monkeypatch)
    with pytest.raises(BridgeConfigUnwritable, match="a symbolic link that another user made"):
        write_bridge_config(config(), link / FILE_NAME)


def test_a_directory_in_which_everybody_may_replace_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(BridgeConfigUnwritable, match="every user may replace files"):
        write_bridge_config(config(), tmp_path / "open" / FILE_NAME)
    (tmp_path / "open").chmod(0o1777)
    write_bridge_config(config(), tmp_path / "open" / FILE_NAME)


def test_a_place_that_cannot_be_written_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BridgeConfigUnwritable, match=r"cannot write .*LOGDIR"):
        write_bridge_config(config(), tmp_path / "file" / FILE_NAME)


def test_a_server_takes_its_own_file_away_and_nobody_elses(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    with announced(config("first"), path, required=True):
        assert find(tmp_path, path, "first")
        with capture_logs() as logs, announced(config("second"), path, required=True):
            assert logs[0]["generation"] == "first"
            assert logs[0]["event"].startswith("replacing the bridge config of another server")
        assert not path.exists()
        write_bridge_config(config("third"), path)
    assert find(tmp_path, path, "third")


def test_a_file_that_nobody_asked_for_may_be_missing(tmp_path: Path) -> None:
    blocked = tmp_path / "file" / FILE_NAME
    blocked.parent.touch()
    with capture_logs() as logs, announced(config("first"), blocked, required=False):
        assert logs[0]["event"] == "going on without a bridge config"
    with (
        pytest.raises(BridgeConfigUnwritable),
        announced(config("first"), blocked, required=True),
    ):
        pass
