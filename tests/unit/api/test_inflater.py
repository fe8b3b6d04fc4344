"""Decompression piece by piece."""

from __future__ import annotations

import gzip

import pytest

from grpo_api.errors import Refused
from grpo_api.inflate import Inflater

TWO_MEMBERS = gzip.compress(b"hello ", mtime=0) + gzip.compress(b"world", mtime=0)


def inflate(data: bytes, max_bytes: int = 100, piece: int = 1000) -> bytes:
    inflater = Inflater(max_bytes)
    output = b"".join(inflater.feed(data[i : i + piece]) for i in range(0, len(data), piece))
    inflater.finish()
    return output


@pytest.mark.parametrize("piece", [1, 2, 7, 1000])
@pytest.mark.parametrize("padding", [b"", b"\0" * 5])
def test_members_add_up_however_they_are_cut(piece: int, padding: bytes) -> None:
    assert inflate(TWO_MEMBERS + padding, piece=piece) == b"hello world"


def test_empty_body_is_empty() -> None:
    assert inflate(b"") == b""


@pytest.mark.parametrize("piece", [1, 1000])
def test_limit_counts_all_members_exactly(piece: int) -> None:
    assert inflate(TWO_MEMBERS, max_bytes=11, piece=piece) == b"hello world"
    with pytest.raises(Refused) as refused:
        inflate(TWO_MEMBERS, max_bytes=10, piece=piece)
    assert refused.value.status == 413


@pytest.mark.parametrize("piece", [1, 1000])
@pytest.mark.parametrize(
    "data", [b"{}", TWO_MEMBERS[:-1], TWO_MEMBERS[:30], TWO_MEMBERS + b"x", b"\0" + TWO_MEMBERS]
)
def test_what_is_not_gzip_is_refused(data: bytes, piece: int) -> None:
    with pytest.raises(Refused) as refused:
        inflate(data, piece=piece)
    assert refused.value.status == 400
