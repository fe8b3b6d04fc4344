"""Which Accept-Encoding headers allow gzip (RFC 9110, 12.5.3)."""

from __future__ import annotations

import pytest

from grpo_api.compression import accepts_gzip


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        *((h, True) for h in ("GZip", "x-gzip", "br , gzip ; q=0.3", "gzip;q=0.001")),
        *((h, True) for h in ("*;q=0.1", "identity;q=0,gzip")),
        *((h, False) for h in ("", "br", "gzipped", "gzip;q=x", "gzip;q=nan", "*;q=0")),
        *((h, False) for h in ("gzip; Q=0.000", "gzip;q=0, *")),
    ],
)
def test_gzip_is_accepted(header: str, accepted: bool) -> None:
    assert accepts_gzip(header) is accepted
