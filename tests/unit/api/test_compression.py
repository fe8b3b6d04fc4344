"""Who accepts gzip (RFC 9110, 12.5.3)."""

from __future__ import annotations

import pytest

from grpo_api.compression import accepts_gzip


@pytest.mark.parametrize(
    "header",
    [
        *("gzip", "GZip", "x-gzip", "deflate, gzip;q=1.0, *;q=0.5", "gzip;q=0.001", "*", "*;q=0.1"),
        *("br , gzip ; q=0.3", "identity;q=0,gzip"),
    ],
)
def test_accepted(header: str) -> None:
    assert accepts_gzip(header)


@pytest.mark.parametrize(
    "header",
    [
        *("", "identity", "br", "gzip;q=0", "gzip; Q=0.000", "gzip;q=0, *", "*;q=0"),
        *("gzipped", "gzip;q=x", "gzip;q=nan"),
    ],
)
def test_not_accepted(header: str) -> None:
    assert not accepts_gzip(header)
