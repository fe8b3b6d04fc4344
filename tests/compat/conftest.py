"""atroposlib from the package index."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.upstream_install import python_with


@pytest.fixture(scope="session")
def upstream() -> Path:
    """The interpreter that has atroposlib."""
    return python_with("atroposlib")
