"""The chart's objects, as Helm renders them without a cluster."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "grpo"
HELM = Path(sys.executable).parent / "helm"
SHAPES = sorted(file.name.removesuffix("-values.yaml") for file in (CHART / "ci").iterdir())
VERSIONS = ("1.30", "1.31", "1.32", "1.33", "1.34", "1.35")
NEWEST = VERSIONS[-1]
NEEDS_1_34 = frozenset({"shared-vllm-dra"})
PODS = {"Pod", "Deployment", "StatefulSet", "Job"}

Object = dict[str, Any]


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HELM, *arguments], cwd=CHART, capture_output=True, text=True, check=False
    )


def template(*arguments: str, version: str = NEWEST) -> subprocess.CompletedProcess[str]:
    """Release "run" in the namespace "team"."""
    return helm(
        *("template", "run", ".", "--namespace", "team", "--kube-version", f"{version}.0"),
        *arguments,
    )


def versions_of(shape: str) -> list[str]:
    return [v for v in VERSIONS if shape not in NEEDS_1_34 or v >= "1.34"]


@functools.cache
def rendered(shape: str, version: str = NEWEST, *more: str) -> str:
    """Args: more: further options of Helm"""
    done = template("--values", f"ci/{shape}-values.yaml", *more, version=version)
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def objects(shape: str, version: str = NEWEST, *more: str) -> list[Object]:
    documents = yaml.load_all(rendered(shape, version, *more), Loader=yaml.CSafeLoader)
    return [document for document in documents if document]


def pod_templates(of: list[Object]) -> Iterator[Object]:
    """Metadata and spec of every pod that the objects make."""
    for each in of:
        kind, spec = each["kind"], each.get("spec", {})
        if kind == "Pod":
            yield each
        elif kind in PODS:
            yield spec["template"]


def containers(pod: Object) -> list[Object]:
    spec = pod["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]


def component(of: Object) -> str:
    name: str = of["metadata"]["labels"]["app.kubernetes.io/component"]
    return name
