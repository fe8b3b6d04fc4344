"""What cannot work ends at once, with a status and the reason in one line."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.stack import ROOT, TEST_WITHIN_S, Done, Stack, own_ports

pytestmark = pytest.mark.timeout(TEST_WITHIN_S)


@pytest.fixture(scope="module")
def stack(stack_settings: dict[str, str]) -> Iterator[Stack]:
    stack = Stack("none", "grpo-test-bad", {**stack_settings, **own_ports(), "STEPS": "1"})
    yield stack
    stack.down()


def refused(done: Done, *reasons: str) -> None:
    assert done.returncode != 0, done.stdout
    for reason in reasons:
        assert reason in done.stdout + done.stderr


def test_an_unknown_mode_lists_the_four(stack: Stack) -> None:
    unknown = Stack("lora", stack.project, stack.settings).up()
    refused(unknown, "MODE=lora: no such mode; choose one of: shared_vllm lora_only lora_restart")


def test_servers_that_cannot_be_are_refused_with_what_to_set(stack: Stack) -> None:
    shared = Stack("shared_vllm", stack.project, stack.settings)
    refused(shared.up(REPLICAS="3"), "REPLICAS=3: in mode shared_vllm", "MODE=none")
    refused(stack.up(REPLICAS="some"), "REPLICAS=some: expected a number of inference servers")
    first = int(stack.settings["VLLM_PORT"])
    refused(stack.up(REPLICAS="3"), f"set VLLM_PORT={first}-{first + 2}")
    gpu = stack.up(REPLICAS="3", VLLM_PORT="9001-9003", STACK_DEVICE="gpu")
    refused(gpu, "every server the same GPU", "REPLICAS=1")


def test_what_the_host_lacks_is_named(stack: Stack, tmp_path: Path) -> None:
    refused(
        stack.up(DOCKER_HOST="unix:///nowhere.sock"),
        "Docker engine does not answer: start the Docker engine",
    )
    gpu = stack.up(STACK_DEVICE="gpu", GPU_BASE_IMAGE=stack.settings["BASE_IMAGE"])
    refused(gpu, "no runtime named nvidia", "STACK_DEVICE=cpu")
    (tmp_path / "docker").write_text("#!/bin/sh\nexit 1\n")  # knows nothing of compose
    (tmp_path / "docker").chmod(0o755)
    done = stack.up(PATH=f"{tmp_path}:{os.environ['PATH']}")
    refused(done, "docker has no compose plugin: install Docker Compose 2.24 or newer")


def test_settings_are_written_once_there_is_an_engine_to_ask(tmp_path: Path) -> None:
    """They would say that the host has no GPU, for good."""
    for name in ("Makefile", "docker-compose.yml", "containers", "helm"):
        (tmp_path / name).symlink_to(ROOT / name)
    command = ["make", "--no-print-directory", "config", "MODE=none"]
    for host, written in (("unix:///nowhere.sock", False), (os.environ.get("DOCKER_HOST"), True)):
        there = {**os.environ, **({"DOCKER_HOST": host} if host else {})}
        done = subprocess.run(command, cwd=tmp_path, env=there, capture_output=True, check=False)
        assert (done.returncode == 0) == written, done.stderr
        assert (tmp_path / ".env").exists() == written


def test_a_port_that_is_taken_is_named(stack: Stack) -> None:
    port = stack.settings["RUN_API_PORT"]
    with socket.create_server(("127.0.0.1", int(port))):
        refused(stack.up(), port, "address already in use")


def test_a_data_directory_that_is_not_there_is_named(stack: Stack, tmp_path: Path) -> None:
    refused(stack.up(TASK="gsm8k", DATA=str(tmp_path / "no-data")), "no-data", "does not exist")


def test_the_model_is_looked_at_before_anything_trains(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o755)
    os.chown(tmp_path / "theirs", 4321, 4321)
    theirs = stack.compose("run", "--rm", "model", CHECKPOINTS=str(tmp_path / "theirs"))
    refused(theirs, "Permission denied", "chown -R 1000:1000")
    refused(stack.compose("run", "--rm", "model", MODEL="x/y"), "MODEL is set and LR is not")


def test_a_refused_run_is_explained_and_goes_with_down(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = stack.up(MODEL=str(tmp_path / "empty"))
    refused(done, "model ended with status 1", "/model has no config.json")
    assert stack.left_behind() != []
    stack.down()


def test_too_little_shared_memory_is_said_by_the_server(stack: Stack, own_model: Path) -> None:
    """One worker needs none; several do. It may be on its second start when that is said."""
    small = {"SHM_SIZE": "64m", "SERVER_RESTARTS": "1"}
    small |= {"VLLM_FLAGS": "--tensor-parallel-size 2"}
    done = stack.up(MODEL=str(own_model), **small)
    refused(done, "vllm-server-none ended ", "/dev/shm has 64 MiB", "SHM_SIZE")
