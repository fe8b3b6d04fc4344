"""Images, built once, and releases that leave nothing behind. Run through `make test-helm`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.containers.conftest import TAG, base_image, stack_settings  # noqa: F401
from tests.helm.release import Release, kubectl, relaxed_chart


@pytest.fixture(scope="session")
def chart(stack_settings: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: ARG001, F811
    """The chart, for a cluster that has the images and is older than the chart asks for."""
    return relaxed_chart(tmp_path_factory.mktemp("chart"))


@pytest.fixture(params=["none", "lora_only", "lora_restart", "shared_vllm"])
def release(request: pytest.FixtureRequest, chart: Path) -> Iterator[Release]:
    mode: str = request.param
    with namespace_of(Release(mode, f"test-{mode.replace('_', '-')}", chart, TAG)) as release:
        yield release


@pytest.fixture
def two_nodes(chart: Path) -> Iterator[Release]:
    with namespace_of(Release("none", "test-two-nodes", chart, TAG)) as release:
        yield release


@contextmanager
def namespace_of(release: Release) -> Iterator[Release]:
    kubectl("create", "namespace", release.namespace)
    try:
        yield release
    finally:
        kubectl("delete", "namespace", release.namespace, "--wait=true")
