"""Variables of the archived server that share the weights; runs, directories and the API key."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from grpo_core.security import plain
from grpo_core.settings import load_settings
from grpo_core.tree.server import ServerSettings
from grpo_vllm.weights.staging import NotFetched, Staging
from tests.unit.conftest import Refused

SHARED = {"VLLM_ENABLE_SHARED_WEIGHTS": "1"}
NODES = {"NUM_INFERENCE_NODES": "0"}


@pytest.mark.parametrize(
    ("variables", "flags", "shares"),
    [
        ({}, "", False),
        (SHARED, "", True),
        (NODES, "", True),
        (NODES | {"VLLM_ENABLE_SHARED_WEIGHTS": "0"}, "", False),
        (NODES, "--no-share-weights", False),
        (SHARED, "--enable-lora", False),
        (NODES, "--enable_lora", False),
        ({"NUM_INFERENCE_NODES": "2"}, "", False),
        ({"NUM_INFERENCE_NODES": "2"} | SHARED, "", False),
    ],
)
def test_a_variable_shares_the_weights_unless_the_server_takes_adapters(
    variables: dict[str, str], flags: str, shares: bool
) -> None:
    chosen = load_settings(ServerSettings, ["--model", "m", *flags.split()], variables)
    assert chosen.share_weights is shares


def test_variables_without_effect_and_invalid_ones_are_named(
    refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    load_settings(ServerSettings, ["--model", "m", "--enable-lora"], SHARED)
    told = capsys.readouterr().err
    assert told == "vllm-api-server: ignored with --enable-lora: VLLM_ENABLE_SHARED_WEIGHTS\n"
    told = refused(load_settings, ServerSettings, ["--model", "m"], {"NUM_INFERENCE_NODES": "x"})
    assert "NUM_INFERENCE_NODES: expected the number of inference servers" in told


@pytest.mark.parametrize(
    ("flags", "url", "weights_url"),
    [
        ("--port 9", "http://127.0.0.1:9", "http://127.0.0.1:1009/weights"),
        ("--port 9 --host 10.0.0.1", "http://10.0.0.1:9", ""),
        (
            "--port 9 --host 0.0.0.0 --control-host 0.0.0.0",
            f"http://{socket.gethostname()}:9",
            f"http://{socket.gethostname()}:1009/weights",
        ),
        (
            "--advertise-url https://gpu3/vllm/ --control-host 10.0.0.1 --health-port 7",
            "https://gpu3/vllm",
            "http://10.0.0.1:7/weights",
        ),
        ("--port 9 --host ::1", "http://[::1]:9", "http://127.0.0.1:1009/weights"),
    ],
)
def test_a_server_tells_others_where_it_is_reached(flags: str, url: str, weights_url: str) -> None:
    found = load_settings(ServerSettings, ["--model", "m", *flags.split()], {})
    assert (found.advertise_url, found.weights_url) == (url, weights_url)
    assert found.server_name == f"{socket.gethostname()}-{found.port}"


def test_no_password_is_told_to_others(refused: Refused) -> None:
    words = ["--model", "m", "--advertise-url", "http://me:hunter2@gpu3"]
    told = refused(load_settings, ServerSettings, words, {})
    assert "--advertise-url: expected a URL without user and password" in told
    assert "hunter2" not in told


def test_servers_with_different_ports_have_different_runs_and_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for port in ("9001", "9002"):
        server = load_settings(ServerSettings, ["--model", "m", "--port", port], {})
        assert server.run_id == f"port-{port}"
        assert server.loads_from == tmp_path / "grpo" / f"port-{port}" / "served_weights"
        assert not server.redis_required
    assert load_settings(ServerSettings, ["--model", "m", "--redis-url", "none"], {}).redis is None


@pytest.mark.parametrize(
    ("flags", "variable", "key", "passed_on"),
    [
        (["--api-key", "a", "-tp", "2"], "c", "a", ["-tp", "2"]),
        (["--api_key=a", "--api-key", "b"], "", "b", []),
        ([], "", None, []),
    ],
)
def test_one_key_is_taken_and_not_passed_on(
    flags: list[str], variable: str, key: str | None, passed_on: list[str], refused: Refused
) -> None:
    words, variables = ["--model", "m", *flags], {"VLLM_API_KEY": variable}
    settings = load_settings(ServerSettings, words, variables)
    assert (plain(settings.api_key), settings.engine_arguments) == (key, tuple(passed_on))
    refused(load_settings, ServerSettings, [*words, "--api-key", ""], variables)


async def test_the_directory_for_fetched_weights_is_the_users_and_stays(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    flags = ["--run-id", "day", "--server-name", "a", "--staging-dir", str(tmp_path)]
    chosen = load_settings(ServerSettings, ["--model", "m", *flags])
    staging = Staging(chosen.staging, chosen.loads_from)
    await staging.open("1-5")
    assert chosen.staging == tmp_path / f"grpo-{os.getuid()}-day-a"
    await staging.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


async def test_a_staging_directory_that_others_may_enter_is_not_used(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "own", tmp_path)
    await staging.open("1-5")
    assert staging.directory.stat().st_mode & 0o777 == 0o700
    staging.directory.chmod(0o750)
    with pytest.raises(NotFetched, match=r"mode 700.*mode 0750.*--staging-dir"):
        await staging.open("1-6")
    (tmp_path / "link").symlink_to(tmp_path / "own")
    with pytest.raises(NotFetched, match="must be a directory"):
        await Staging(tmp_path / "link", tmp_path).open("1-6")
