"""Every supported shape of the chart: valid for every version of Kubernetes, and as reviewed.

After a change that is meant, `make chart-snapshots` writes the snapshots again; review the change.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
from pathlib import Path

import kubernetes_validate
import pytest

from tests.chart.rendering import SHAPES, helm, objects, rendered, versions_of

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


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_is_as_reviewed(shape: str) -> None:
    """The snapshot of BASE is complete; every other snapshot is its difference from BASE."""
    snapshot = SNAPSHOTS / (f"{shape}.yaml" if shape == BASE else f"{shape}.diff")
    found = rendered(shape) if shape == BASE else difference(rendered(BASE), rendered(shape))
    if os.environ.get("WRITE_SNAPSHOTS"):
        snapshot.write_text(found)
    assert found == snapshot.read_text(), "run make chart-snapshots, and review the change"


def difference(before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=2, lineterm="")
    return "".join("@@\n" if line.startswith("@@") else f"{line}\n" for line in lines)


def test_no_snapshot_is_left_over() -> None:
    assert sorted(file.stem for file in SNAPSHOTS.iterdir()) == SHAPES


def test_the_chart_has_no_lint() -> None:
    done = helm("lint", "--strict", ".", "--values", "ci/minimal-values.yaml")
    assert done.returncode == 0, done.stdout
