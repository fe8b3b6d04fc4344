"""`make images` names, pushes and describes the images as the Helm chart expects them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.containers import registry
from tests.containers.registry import Registry
from tests.containers.stack import ROOT, TEST_WITHIN_S, Done, docker, run
from tests.containers.test_images import inside

VERSION = (ROOT / "shared/grpo_core/VERSION").read_text().strip()
ALL = ("environment", "redis", "run-api", "single", "trainer", "vllm-server")
SMALL = ("redis",)

pytestmark = pytest.mark.timeout(TEST_WITHIN_S)


@pytest.fixture
def local_registry(tmp_path: Path) -> Iterator[Registry]:
    with registry.running(tmp_path) as started:
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
