"""The archived system's own code from the package index."""

from __future__ import annotations

import pytest

from tests.compat.upstream_install import NoPackageIndex, Upstream, ensure_upstream


@pytest.fixture(scope="session")
def upstream() -> Upstream:
    try:
        return ensure_upstream()
    except NoPackageIndex as error:
        pytest.skip(f"no package index: {error}")
