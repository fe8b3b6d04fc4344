"""The scan accepts nothing that the record refuses, and reads the same from what it accepts."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from pydantic import ValidationError

from grpo_api.group_scan import scan_group
from grpo_api.payloads import compress, stored, unpack
from grpo_core.wire import ScoredGroup

Json = dict[str, Any]


def usual(sequences: int = 2) -> Json:
    """A group as environments send it."""
    tokens = [[5, 6, 90 + i, 91] for i in range(sequences)]
    return {
        "tokens": tokens,
        "masks": [[-100, -100, *row[2:]] for row in tokens],
        "scores": [float(i) for i in range(sequences)],
        "inference_logprobs": [[1.0, 1.0, -0.25, -1.5]] * sequences,
        "messages": [[{"role": "user", "content": "a [bracket] é"}]] * sequences,
        "overrides": [],
        "group_overrides": {"policy_version": [[[0, 1], [0, 1]]] * sequences},
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


def test_usual_group_is_recognised() -> None:
    facts = scan_group(encoded(usual(3)))
    assert facts is not None
    assert (facts.env_id, facts.sequences) == (3, 3)
    assert facts.absent == ("distill_token_ids", "distill_logprobs")


@pytest.mark.parametrize(
    "dropped", [(), ("messages", "overrides", "images"), ("inference_logprobs", "env_id")]
)
def test_what_is_served_is_what_the_record_reads(dropped: tuple[str, ...]) -> None:
    text = encoded({key: value for key, value in usual().items() if key not in dropped})
    facts = scan_group(text)
    assert facts is not None
    served = json.loads(unpack(stored(compress(text), facts.absent)))
    assert set(served) == set(ScoredGroup.model_fields)
    assert ScoredGroup.model_validate(served) == as_record(text)


NOT_USUAL: dict[str, Json] = {
    "array in a row": {"tokens": [[5, 6, 90, [91]], [5, 6, 91, 91]]},
    "arrays for numbers": {"tokens": [[[5], [6], [90], [91]], [5, 6, 91, 91]]},
    "arrays that make up for others": {"tokens": [[[5, 6], [], [90], [91]], [5, 6, 91, 91]]},
    "object in a row": {"tokens": [[5, 6, 90, {}], [5, 6, 91, 91]]},
    "object of rows": {"tokens": {"aaaa": [5, 6, 90, 91], "bbbb": [5, 6, 91, 91]}},
    "object of scores": {"scores": {"a": 1.0, "b": 2.0}},
    "fraction of a token": {"tokens": [[5, 6, 90.5, 91], [5, 6, 91, 91]]},
    "negative token": {"tokens": [[5, 6, -90, 91], [5, 6, 91, 91]]},
    "token beyond 31 bits": {"tokens": [[5, 6, 2**31, 91], [5, 6, 91, 91]]},
    "mask below -100": {"masks": [[-101, -100, 90, 91], [-100, -100, 91, 91]]},
    "short mask": {"masks": [[-100, -100, 90], [-100, -100, 91, 91]]},
    "shifted masks": {"masks": [[-100, -100, 90], [-100, -100, 91, 91, 91]]},
    "missing mask": {"masks": [[-100, -100, 90, 91]]},
    "empty sequence": {"tokens": [[], [5]], "masks": [[], [5]], "inference_logprobs": None},
    "no sequence": {"tokens": [], "masks": [], "scores": [], "messages": []},
    "missing score": {"scores": [1.0]},
    "null score": {"scores": [1.0, None]},
    "nested score": {"scores": [[1.0], [2.0]]},
    "misaligned logprobs": {"inference_logprobs": [[1.0, 1.0, -0.25], [1.0, 1.0, -0.2, -0.1]]},
    "nested logprobs": {"inference_logprobs": [[[1.0], 1.5, -0.2, -0.1]] * 2},
    "text for a logprob": {"inference_logprobs": [["x", 1.5, -0.2, -0.1]] * 2},
    "negative env_id": {"env_id": -1},
    "conversation too few": {"messages": [[{"role": "user", "content": "x"}]]},
    "message without a role": {"messages": [[{"content": "x"}]] * 2},
    "messages as text": {"messages": "hello"},
    "override too few": {"overrides": [{}]},
    "overrides as an object": {"overrides": {"a": 1}},
    "generation_params as a list": {"generation_params": [1]},
    "half of a distillation": {"distill_token_ids": [[[1]] * 4] * 2},
}


@pytest.mark.parametrize("change", NOT_USUAL.values(), ids=NOT_USUAL.keys())
def test_what_the_record_refuses_is_not_recognised(change: Json) -> None:
    text = encoded(usual() | change)
    assert as_record(text) is None
    assert scan_group(text) is None


def test_brackets_do_not_hide_behind_escaped_ones() -> None:
    nested = {"tokens": [[[5], [6], 90, 91], [5, 6, 91, 91]], "images": {"a": "@@"}}
    text = encoded(usual() | nested).replace(b"@", b"\\u005b")
    assert as_record(text) is None
    assert scan_group(text) is None


COERCED: dict[str, Json] = {
    "integral float": {"tokens": [[5.0, 6, 90, 91], [5, 6, 91, 91]]},
    "number as text": {"masks": [["-100", -100, 90, 91], [-100, -100, 91, 91]]},
    "integer scores": {"scores": [0, 1]},
    "row of integers": {"inference_logprobs": [[1, 0, 0, -1], [1.0, 1.0, -0.5, -0.1]]},
    "boolean": {"masks": [[-100, -100, True, 91], [-100, -100, 91, 91]]},
    "boolean score": {"scores": [True, 1.0]},
    "boolean env_id": {"env_id": True},
    "unknown field": {"something": [1, 2]},
    "text for env_id": {"env_id": "3"},
    "integer beyond 53 bits": {"inference_logprobs": [[2**53 + 1, 1.0, -0.25, -1.5]] * 2},
    "integer beyond 63 bits": {"ref_logprobs": [[0.5, -0.5], [2**63, -0.5]]},
}


@pytest.mark.parametrize("change", COERCED.values(), ids=COERCED.keys())
def test_what_has_to_be_coerced_is_left_to_the_record(change: Json) -> None:
    text = encoded(usual() | change)
    assert as_record(text) is not None
    assert scan_group(text) is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xef\xbb\xbf" + encoded(usual()),
        b" " + encoded(usual()),
        encoded(usual())[:-1] + b',"env_id":4}',
        encoded(usual())[:-1] + b',"images":1e999}',
        encoded(usual())[:-1] + b',"images":"\\ud800"}',
        encoded(usual())[:-1] + b',"images":"\xff"}',
        encoded(usual()).replace(b"-0.25", b"NaN"),
        encoded(usual()).replace(b"-0.25", b"Infinity"),
        encoded(usual()).replace(b'"images": null', b'"images": ' + b"[" * 300 + b"]" * 300),
        encoded(usual()).replace(b'"images": null', b'"images": ' + b"9" * 5000),
    ],
)
def test_what_is_no_plain_object_is_not_recognised(text: bytes) -> None:
    assert scan_group(text) is None


def test_whatever_is_recognised_the_record_reads_in_the_same_way() -> None:
    """Random damage to usual groups: values swapped for others, bytes for other bytes."""
    rng = random.Random(0)
    recognised = 0
    for _ in range(3000):
        text = _damaged(rng)
        facts = scan_group(text)
        if facts is None:
            continue
        recognised += 1
        record = as_record(text)
        assert record is not None, text
        assert (facts.env_id, facts.sequences) == (record.env_id, record.size), text
        served = unpack(stored(compress(text), facts.absent))
        assert ScoredGroup.model_validate_json(served) == record, text
    assert 300 < recognised < 2700


_VALUES: list[Any] = [
    *(None, True, 0, 1, -1, -100, 1.5, -0.25, 2**31, 2**63, 2**64, "", "1", "x", [], [1], [[1]]),
    *([1.5], [[1.5, -0.5]], {}, {"role": "user", "content": "[", "x": [1.5]}, [[]], [{}], 1e308),
]


def _damaged(rng: random.Random) -> bytes:
    group = json.loads(json.dumps(usual(rng.randint(1, 3))))
    for _ in range(rng.randint(0, 2)):
        _swap(rng, group)
    text = json.dumps(group, separators=rng.choice([(",", ":"), (", ", ": ")])).encode()
    if rng.random() < 0.3:
        at = rng.randrange(len(text))
        text = text[:at] + bytes([rng.choice(b'[]{}",:0159.-e\\u \n\xff')]) + text[at + 1 :]
    return text


def _swap(rng: random.Random, group: Json) -> None:
    """Replace, insert or delete one value, at a random depth."""
    holder: Any = group
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(holder[key], dict | list) and rng.random() < 0.8:
            holder = holder[key]
            continue
        action = rng.random()
        if action < 0.2:
            del holder[key]
        elif action < 0.4 and isinstance(holder, list):
            holder.insert(key, rng.choice(_VALUES))
        else:
            holder[key] = rng.choice(_VALUES)
        return
