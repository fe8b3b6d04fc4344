"""Request bodies are decompressed within limits; `scan_group` accepts no group that `ScoredGroup`
rejects, and reads the same values; reasons for a refusal."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from grpo_api.decode import TooMuchWork, inflate, inflate_member
from grpo_api.errors import Refused
from grpo_api.group_scan import scan_group
from grpo_api.store.payloads import compress, payload_of, unpack
from grpo_api.store.run import MAX_REASON_CHARS, refusal_line
from grpo_core.wire.scored_group import ScoredGroup

CONTENT = b'{"tokens":[[1,2,3]],"masks":[[-100,2,3]]}'
MEMBER = gzip.compress(CONTENT, mtime=0)


@given(parts=st.lists(st.binary(max_size=50), max_size=4), padding=st.integers(0, 3))
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


Json = dict[str, Any]


def usual(sequences: int = 2) -> Json:
    """A group in the usual form."""
    each = range(sequences)
    return {
        "tokens": [[5, 6, 90 + i, 91] for i in each],
        "masks": [[-100, -100, 90 + i, 91] for i in each],
        "scores": [float(i) for i in each],
        "inference_logprobs": [[1.0, 1.0, -0.25, -1.5] for _ in each],
        "messages": [[{"role": "user", "content": "a [bracket] é"}] for _ in each],
        "overrides": [],
        "group_overrides": {"policy_version": [[[0, 1], [0, 1]] for _ in each]},
        "generation_params": {"temperature": 0.7},
        "images": None,
        "advantages": None,
        "ref_logprobs": None,
        "env_id": 3,
    }


def encoded(group: Json) -> bytes:
    return json.dumps(group).encode()


def as_record(text: bytes) -> ScoredGroup | None:
    try:
        return ScoredGroup.model_validate_json(text)
    except ValidationError:
        return None


def reads_as_the_record(text: bytes) -> bool:
    """Whether `scan_group` accepts the text; if so, `ScoredGroup` must read the same values."""
    facts = scan_group(text)
    if facts is None:
        return False
    record = as_record(text)
    assert record is not None
    assert (facts.env_id, facts.sequences) == (record.env_id, record.size)
    served = unpack(payload_of(compress(text), facts.absent))
    assert set(json.loads(served)) == set(ScoredGroup.model_fields)
    assert ScoredGroup.model_validate_json(served) == record
    return True


def test_a_usual_group_is_recognised() -> None:
    group = usual(3)
    assert reads_as_the_record(encoded(group))
    del group["messages"], group["env_id"]
    assert reads_as_the_record(encoded(group))


@pytest.mark.parametrize(
    ("change", "is_refused"),
    [
        ({"tokens": [[[5, 6], [], [90], [91]], [5, 6, 91, 91]]}, True),
        ({"masks": [[-100, -100, 90], [-100, -100, 91, 91, 91]]}, True),
        ({"scores": [0.5, 3.5e38]}, True),
        ({"scores": [0, 1]}, False),
        ({"something": 1}, False),
    ],
    ids=["arrays make up for others", "shifted masks", "beyond float32", "integers", "unknown"],
)
def test_other_groups_are_left_to_the_record(change: Json, is_refused: bool) -> None:
    text = encoded(usual() | change)
    assert (as_record(text) is None) == is_refused
    assert scan_group(text) is None


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{}", b"[]", encoded(usual())[:-1] + b',"env_id":4}'),
        encoded(usual()).replace(b"-0.25", b"NaN"),
        encoded(usual()).replace(b'"images": null', b'"images": ["\\ud800"]'),
    ],
)
def test_text_that_is_no_plain_object_is_not_recognised(text: bytes) -> None:
    assert scan_group(text) is None


def paths(value: Any) -> Iterator[list[Any]]:
    """The paths of all values of a group, at any depth."""
    keys = value if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield [key]
        if isinstance(value[key], dict | list):
            yield from ([key, *deeper] for deeper in paths(value[key]))


VALUES = [
    *(None, True, 0, 1, -1, -100, 1.5, 2**31, 2**63, 2**64, 1e308, 3.5e38, -1e39, 1e-39, 10**400),
    *("", "1", "x", {}, {"temperature": 1e39}, {"role": "user", "content": "[", "x": [1.5]}),
    *([], [1], [{}], [1.5], [[]], [[1]], [[1.5, -0.5]]),
]
DAMAGE = st.tuples(
    st.sampled_from([*paths(usual())]),
    st.sampled_from(["replace", "insert", "delete"]),
    st.sampled_from(VALUES),
)
TYPO = st.tuples(st.integers(0, 700), st.sampled_from(b'[]{}",:019.-e\\u\n\xff'))


def damage(group: Json, path: list[Any], action: str, value: Any) -> None:
    *way, key = path
    holder: Any = group
    for step in way:
        holder = holder[step]
    if action == "delete":
        del holder[key]
    elif action == "insert" and isinstance(holder, list):
        holder.insert(key, value)
    else:
        holder[key] = value


@settings(max_examples=3 * settings().max_examples)
@given(damages=st.lists(DAMAGE, max_size=2), typo=st.none() | TYPO)
def test_the_record_reads_the_same_from_whatever_is_recognised(
    damages: list[tuple[list[Any], str, Any]], typo: tuple[int, int] | None
) -> None:
    group = usual()
    for path, action, value in damages:
        with suppress(LookupError, TypeError):  # earlier damage removed this place
            damage(group, path, action, copy.deepcopy(value))
    text = bytearray(encoded(group))
    if typo is not None and typo[0] < len(text):
        text[typo[0]] = typo[1]
    event(f"recognised: {reads_as_the_record(bytes(text))}")


def test_the_reason_is_one_short_line_without_control_characters() -> None:
    assert refusal_line("scores.1: \x1b[2J\ud800 é\nx", 3) == "env_id 3: scores.1: ?[2J? é"
    assert refusal_line("\n first") == "first"
    assert refusal_line("") == ""
    assert len(refusal_line("long " * 100, 3)) == MAX_REASON_CHARS
