"""Every supported shape of the chart: valid for every version of Kubernetes, and as reviewed.

A snapshot has a line for each value of each container, pod and object, so that a review reads what
differs, and not where YAML writes it. After a change that is meant, `make chart-snapshots` writes
the snapshots again; review the change.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from tests.chart.rendering import (
    SHAPES,
    Object,
    component,
    containers,
    helm,
    objects,
    pod_templates,
    versions_of,
)

SNAPSHOTS = Path(__file__).parent / "snapshots"
BASE = "minimal"
_MONITORS = ("ServiceMonitor", "PodMonitor", "PrometheusRule")
CUSTOM = ("ScaledObject", "TriggerAuthentication", *_MONITORS)
"""Kinds that Kubernetes does not know; the snapshots show them."""


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_is_valid_for_every_version(shape: str) -> None:
    for version in versions_of(shape):
        for each in objects(shape, version):
            if each["kind"] not in CUSTOM:
                check(json.dumps(each), version)


@functools.cache  # most objects are the same in many shapes
def check(document: str, version: str) -> None:
    """Raises an error that names an unknown key, a wrong type or an unknown kind."""
    kubernetes_validate.validate(json.loads(document), version, strict=True)


OF_RULES = re.compile(
    "|".join(
        [
            *(
                "labels",
                "selector",
                "matchLabels",
                "podAffinity",
                "securityContext",
                "imagePullPolicy",
            ),
            *("enableServiceLinks", "automount", "serviceAccountName"),
        ]
    )
)
"""Keys that are the same everywhere, or that test_rules.py checks."""


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_is_as_reviewed(shape: str) -> None:
    """The snapshot of BASE is complete; every other snapshot is its difference from BASE."""
    snapshot, base = SNAPSHOTS / f"{shape}.txt", list(dict.fromkeys(values(objects(BASE))))
    lines = list(dict.fromkeys(values(objects(shape))))
    if shape != BASE:
        removed = [f"- {line}" for line in base if line not in lines]
        lines = removed + [f"+ {line}" for line in lines if line not in base]
    found = "".join(f"{line}\n" for line in lines)
    if os.environ.get("WRITE_SNAPSHOTS"):
        snapshot.write_text(found)
    assert found == snapshot.read_text(), "run make chart-snapshots, and review the change"


def values(of: list[Object]) -> Iterator[str]:
    """One line for each value: `CONTAINER.KEY: VALUE`, `COMPONENT.pod.KEY: VALUE`, or `KIND
    NAME.KEY: VALUE`."""
    for each in of:
        kind, name, spec = each["kind"], each["metadata"]["name"], each.get("spec", {})
        pods = [*pod_templates([each])]
        if not pods:
            rest = {key: value for key, value in each.items() if key not in ("kind", "metadata")}
            yield from _lines(f"{kind} {name}", rest)
            continue
        (pod,), who = pods, component(each)
        inside = containers(pod)
        yield f"{who}: {kind} {name} of {', '.join(one['name'] for one in inside)}"
        for one in inside:
            yield from _lines(one["name"], {k: v for k, v in one.items() if k != "name"})
        beside = {k: v for k, v in pod["spec"].items() if not k.lower().endswith("containers")}
        yield from _lines(f"{who}.pod", beside)
        if spec is not pod["spec"]:
            yield from _lines(who, {k: v for k, v in spec.items() if k != "template"})


def _lines(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, one in value.items():
            if not OF_RULES.search(key):
                yield from _lines(f"{path}.{key}", one)
    elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
        for one in value:
            name = one.get("name") or one.get("alert")
            rest = {key: more for key, more in one.items() if key != "name"}
            if name:
                yield from _lines(f"{path}.{name}", rest.get("value", rest))
            else:
                yield f"{path}: {json.dumps(one)}"
    else:
        text = value if isinstance(value, str) else json.dumps(value)
        yield f"{path}: {text}".replace("\n", "; ")


def test_no_snapshot_is_left_over() -> None:
    assert sorted(file.stem for file in SNAPSHOTS.iterdir()) == SHAPES


def test_the_chart_has_no_lint() -> None:
    done = helm("lint", "--strict", ".", "--values", "ci/minimal-values.yaml")
    assert done.returncode == 0, done.stdout
