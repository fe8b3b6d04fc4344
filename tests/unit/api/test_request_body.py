"""Request bodies are decompressed within limits."""

from __future__ import annotations

import gzip
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_api.decode import TooMuchWork, inflate, inflate_member
from grpo_api.errors import Refused

CONTENT = b'{"tokens":[[1,2,3]],"masks":[[-100,2,3]]}'
MEMBER = gzip.compress(CONTENT, mtime=0)


@given(
    parts=st.lists(st.binary(max_size=50), max_size=4),
    padding=st.integers(0, 3),
)
def test_members_add_up_to_the_byte_of_the_limit(parts: list[bytes], padding: int) -> None:
    body = b"".join(gzip.compress(part, mtime=0) + b"\0" * padding for part in parts)
    content = b"".join(parts)
    assert inflate(body, len(content)) == content
    if content:
        with pytest.raises(Refused) as refused:
            inflate(body, len(content) - 1)
        assert refused.value.status == 413


def test_one_member_is_inflated_in_one_go_and_more_is_left_to_others() -> None:
    assert inflate_member(MEMBER, len(CONTENT)) == CONTENT
    for body, limit in ((MEMBER, len(CONTENT) - 1), (2 * MEMBER, 1000), (MEMBER + b"x", 1000)):
        with pytest.raises(TooMuchWork):
            inflate_member(body, limit)


def test_members_are_not_counted() -> None:
    assert inflate(gzip.compress(b"") * 10_000 + MEMBER, len(CONTENT)) == CONTENT


@pytest.mark.parametrize("read", [inflate, inflate_member])
def test_gzip_that_is_cut_or_damaged_is_refused(read: Callable[[bytes, int], bytes]) -> None:
    cut = [MEMBER[:end] for end in range(1, len(MEMBER))]
    damaged = MEMBER[:-8] + bytes([MEMBER[-8] ^ 0x55]) + MEMBER[-7:]  # damages the checksum
    for body in (*cut, damaged, b"{}", b"\0" + MEMBER):
        with pytest.raises(Refused, match="not valid gzip") as refused:
            read(body, 1000)
        assert refused.value.status == 400
