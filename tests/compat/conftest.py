"""The archived system's own code from the package index."""

from __future__ import annotations

import pytest

from tests.compat.upstream_install import Upstream
from tests.compat.upstream_processes import installed


@pytest.fixture(scope="session")
def upstream() -> Upstream:
    return installed()
