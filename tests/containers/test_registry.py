"""`make images` names, pushes and describes the images as the Helm chart expects them.

The registry on a port of this machine is from Debian's package docker-registry.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest

from grpo_runs.process.ports import free_port
from tests.containers.stack import ROOT, TEST_WITHIN_S, Done, docker, run
from tests.containers.test_images import inside
from tests.support.wait import wait_for

MANIFEST = {"Accept": "application/vnd.docker.distribution.manifest.v2+json"}


class Registry:
    def __init__(self, address: str) -> None:
        self.address = address

    def answers(self) -> bool:
        try:
            return httpx.get(f"http://{self.address}/v2/").is_success
        except httpx.TransportError:
            return False

    def get(self, path: str) -> Any:
        answer = httpx.get(f"http://{self.address}/v2/{path}", headers=MANIFEST)
        return json.loads(answer.raise_for_status().content)

    def labels(self, name: str, tag: str) -> dict[str, str]:
        config = self.get(f"{name}/manifests/{tag}")["config"]["digest"]
        labels: dict[str, str] = self.get(f"{name}/blobs/{config}")["config"]["Labels"]
        return labels


@contextmanager
def running(directory: Path) -> Iterator[Registry]:
    """It has no login. Docker connects to registries on 127.0.0.1 without TLS."""
    registry = Registry(f"127.0.0.1:{free_port()}")
    storage = {"filesystem": {"rootdirectory": str(directory / "images")}}
    config = {"version": 0.1, "storage": storage, "http": {"addr": registry.address}}
    file = directory / "config.yml"
    file.write_text(json.dumps(config))
    with (directory / "log").open("w") as log:
        process = subprocess.Popen([program(), "serve", str(file)], stdout=log, stderr=log)
        try:
            wait_for(registry.answers)
            yield registry
        finally:
            process.terminate()
            process.wait()


def program() -> str:
    """Debian's package is unpacked once, below the cache directory."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    found = cache / "grpo" / "docker-registry"
    if not found.exists():
        with tempfile.TemporaryDirectory() as directory:
            for command in (
                "apt-get update -qq",
                "apt-get download -qq -o APT::Sandbox::User=root docker-registry",
                "dpkg-deb --extract docker-registry_*.deb .",
            ):
                subprocess.run(["bash", "-c", command], cwd=directory, check=True)
            found.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(directory) / "usr/bin/docker-registry", found)
    return str(found)


VERSION = (ROOT / "shared/grpo_core/VERSION").read_text().strip()
ALL = ("environment", "redis", "run-api", "single", "trainer", "vllm-server")
SMALL = ("redis",)

pytestmark = pytest.mark.timeout(TEST_WITHIN_S)


@pytest.fixture
def local_registry(tmp_path: Path) -> Iterator[Registry]:
    with running(tmp_path) as started:
        yield started
        names = docker("images", "--format", "{{.Repository}}:{{.Tag}}").split()
        docker("rmi", *(name for name in names if name.startswith(started.address)))


def make_images(settings: dict[str, str], **variables: str) -> Done:
    given = [f"{name}={value}" for name, value in variables.items()]
    environment = {**os.environ, **settings}
    environment.pop("REVISION", None)  # make asks git
    return run(["make", "--no-print-directory", "images", *given], environment)


@pytest.mark.parametrize(
    "images", [SMALL, pytest.param(ALL, marks=pytest.mark.full)], ids=["small", "all"]
)
def test_images_are_pushed_under_the_names_of_the_chart(
    images: tuple[str, ...], local_registry: Registry, stack_settings: dict[str, str]
) -> None:
    team = f"{local_registry.address}/team"
    done = make_images(stack_settings, REGISTRY=team, PUSH="1", IMAGES=" ".join(images))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"helm install grpo helm/grpo --set image.registry={team}\n" in done.stdout
    assert local_registry.get("_catalog")["repositories"] == [f"team/grpo-{i}" for i in images]
    revision = run(["git", "rev-parse", "HEAD"]).stdout.strip()
    label = "org.opencontainers.image"
    for image in images:
        name = f"team/grpo-{image}"
        tag = f"{VERSION}-cpu" if image in ("single", "trainer", "vllm-server") else VERSION
        assert local_registry.get(f"{name}/tags/list")["tags"] == [tag]
        labels = local_registry.labels(name, tag)
        assert labels[f"{label}.title"] == f"grpo-{image}"
        assert labels[f"{label}.version"] == VERSION
        assert labels[f"{label}.revision"] == revision
        assert labels[f"{label}.licenses"] == ("BSD-3-Clause" if image == "redis" else "MIT")


def test_a_push_needs_a_registry(stack_settings: dict[str, str]) -> None:
    done = make_images(stack_settings, PUSH="1")
    assert done.returncode != 0
    assert "REGISTRY is not set" in done.stderr


@pytest.mark.parametrize(
    ("image", "tag"),
    [("run-api", VERSION), pytest.param("trainer", f"{VERSION}-cpu", marks=pytest.mark.full)],
)
def test_the_bill_of_materials_lists_packages_of_python_and_of_debian(
    image: str, tag: str, stack_settings: dict[str, str], tmp_path: Path
) -> None:
    prefix = "registry.invalid"
    done = make_images(stack_settings, REGISTRY=prefix, IMAGES=image, SBOM=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    docker("rmi", f"{prefix}/grpo-{image}:{tag}")
    bill = json.loads((tmp_path / f"grpo-{image}-{tag}.cdx.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    purls = [one["purl"].partition("?")[0] for one in bill["components"] if "purl" in one]
    listed = {unquote(purl).replace("_", "-").lower() for purl in purls}
    local = f"grpo-{image}:{stack_settings['STACK_TAG']}{tag.removeprefix(VERSION)}"
    show = "pkg:deb/debian/${Package}@${Version}\n"
    command = ("run", "--rm", "--entrypoint", "dpkg-query", local, "--show", "--showformat", show)
    debian = docker(*command).split()
    python = [f"pkg:pypi/{name}@{it}" for name, it in inside(local)["versions"].items()]
    assert {one.replace("_", "-").lower() for one in [*debian, *python]} <= listed
