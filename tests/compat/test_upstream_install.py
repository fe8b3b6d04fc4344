"""What the suite runs is the published package, and a failed installation leaves nothing behind."""

from __future__ import annotations

import base64
import csv
import hashlib
from pathlib import Path

import pytest

from tests.compat.upstream_install import NoPackageIndex, Upstream, ensure_upstream

pytestmark = pytest.mark.timeout(1800)  # the first use installs atroposlib

PUBLISHED_FILES = 89
"""Python modules in the wheel of version 0.4.0."""


def test_every_module_is_as_published(upstream: Upstream) -> None:
    """By the digests in the wheel's own record."""
    site_packages = next(upstream.python.parents[1].glob("lib/python*/site-packages"))
    for directory in (site_packages, upstream.wheel):
        record = directory / "atroposlib-0.4.0.dist-info" / "RECORD"
        rows = [
            row for row in csv.reader(record.read_text().splitlines()) if row[0].endswith(".py")
        ]
        assert len(rows) == PUBLISHED_FILES
        assert [row[0] for row in rows if row[1] != sha256(directory / row[0])] == []


def sha256(path: Path) -> str:
    """As wheels write it (PEP 427): URL-safe base64 without padding."""
    digest = hashlib.sha256(path.read_bytes()).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def test_without_an_index_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoPackageIndex, match="aiohappyeyeballs"):
        ensure_upstream(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
