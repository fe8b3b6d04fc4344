"""Validates a usual scored group fast, without a Python object for each of its numbers.

`scan_group` accepts a group or returns None; it never rejects one. A group with None goes through
`ScoredGroup`, which converts values and reports errors. `scan_group` accepts a group only if
`ScoredGroup` would accept it with the same values.

Numbers are checked as flat arrays, and the lengths of their rows separately. A flat array hides
nested arrays ([[1], [2]] looks like [1, 2]). So the brackets in the text are counted too, and
compared with the number that rows, fields and free-form values need.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import numpy as np
import simdjson
from pydantic import ValidationError

from grpo_core.wire.fields import FLOAT32_MAX, MASKED, MAX_TOKEN_ID
from grpo_core.wire.scored_group import FreeFormFields, ScoredGroup

FIELDS = frozenset(ScoredGroup.model_fields)
_REQUIRED = frozenset({"tokens", "masks", "scores"})
_FREE_FORM = tuple(FreeFormFields.model_fields)
_NUMBERS = ("advantages", "ref_logprobs", "inference_logprobs")
_RARE = ("distill_token_ids", "distill_logprobs")
_BRACKET = ord("[")
_ESCAPE = b"\\"
_ESCAPED_BRACKET = b"\\u005"
_INTEGER, _FLOAT = "i", "d"
_PARSE_ERRORS = (ValueError, TypeError, KeyError, RuntimeError, ValidationError)

_EXACT_INTEGERS = 2.0**53
"""Larger integers may have no exact float; a payload keeps them as they were written."""

_KEPT_BYTES = 1024 * 1024
_PARSER = simdjson.Parser()
"""Reused for texts of a usual size, since it allocates about ten times their size."""


@dataclass(frozen=True)
class GroupFacts:
    """The metadata of a group, and the names of the fields that its sender left out."""

    env_id: int | None
    sequences: int
    absent: tuple[str, ...]


class _Unusual(Exception):
    """The group is not a usual one. Raised and caught only in this module."""


def scan_group(text: bytes) -> GroupFacts | None:
    """The facts of a usual group. None for any other text, which may still be a valid group."""
    if text[:1] != b"{" or text[-1:] != b"}":
        return None
    if _ESCAPE in text and _ESCAPED_BRACKET in text:  # one byte is found ten times as fast
        return None
    try:
        return _scan(text)
    except (_Unusual, *_PARSE_ERRORS):
        return None


def _scan(text: bytes) -> GroupFacts:
    document = _parse(text)
    names = list(document.keys())
    _expect(len(set(names)) == len(names) and FIELDS.issuperset(names))
    _expect(_REQUIRED.issubset(names))
    given = {name: document[name] for name in names}
    lengths = _integer_rows(given["tokens"], least=0)
    _expect(lengths and all(lengths))
    _expect(_integer_rows(given["masks"], least=MASKED) == lengths)
    arrays = 2 + 2 * len(lengths) + _scores(given["scores"], len(lengths))
    for name in _NUMBERS:
        arrays += _optional_rows(given.get(name), lengths, aligned=name == "inference_logprobs")
    for name in _RARE:
        arrays += _expect_empty(given.get(name))
    arrays += _free_form(given, len(lengths))
    # Faster than bytes.count, which restarts its search after each match.
    brackets = np.count_nonzero(np.frombuffer(text, dtype=np.uint8) == _BRACKET)
    _expect(int(brackets) == arrays)
    return GroupFacts(
        env_id=_env_id(given.get("env_id")),
        sequences=len(lengths),
        absent=tuple(name for name in ScoredGroup.model_fields if name not in given),
    )


def _parse(text: bytes) -> Any:
    if len(text) > _KEPT_BYTES:
        return simdjson.Parser().parse(text)
    try:
        return _PARSER.parse(text)
    except RuntimeError:  # a value of an earlier text is still in use, e.g. by a traceback
        return simdjson.Parser().parse(text)


def _integer_rows(rows: Any, least: int) -> list[int]:
    """Row lengths [S]; every value must be an integer from `least` to the largest token id."""
    _expect(isinstance(rows, simdjson.Array))
    lengths = [len(row) for row in rows]
    values = np.frombuffer(rows.as_buffer(of_type=_INTEGER), dtype=np.int64)
    _expect(values.size == sum(lengths))
    _expect(not values.size or (values.min() >= least and values.max() <= MAX_TOKEN_ID))
    return lengths


def _scores(scores: Any, sequences: int) -> int:
    _expect(isinstance(scores, simdjson.Array))
    values = scores.as_list()
    _expect(len(values) == sequences and all(type(value) is float for value in values))
    _expect(all(abs(value) <= FLOAT32_MAX for value in values))
    return 1


def _optional_rows(rows: Any, lengths: list[int], aligned: bool) -> int:
    """The number of brackets in rows [S] of numbers, of which each row must hold a fraction.

    A row of integers alone ([0, 1]) would be stored as written, and readers would get integers
    instead of floats.
    """
    if rows is None or not len(rows):
        return _expect_empty(rows)
    _expect(isinstance(rows, simdjson.Array))
    own = [len(row) for row in rows]
    values = np.frombuffer(rows.as_buffer(of_type=_FLOAT), dtype=np.float64)
    _expect(len(own) == len(lengths) and all(own) and values.size == sum(own))
    _expect(not aligned or own == lengths)
    starts = [0, *accumulate(own[:-1])]
    fractional = np.logical_or.reduceat(values != np.floor(values), starts)
    _expect(fractional.all())
    _expect(values.min() > -_EXACT_INTEGERS and values.max() < _EXACT_INTEGERS)
    return 1 + len(own)


def _free_form(given: dict[str, Any], sequences: int) -> int:
    """The number of brackets in the free-form fields, after `FreeFormFields` validated them."""
    texts: dict[str, bytes] = {}
    for name in _FREE_FORM:
        value = given.get(name)
        if isinstance(value, simdjson.Array | simdjson.Object):
            texts[name] = cast(bytes, value.mini)
        else:
            _expect(value is None)
    if not texts:
        return 0
    members = (b'"%s":%s' % (name.encode(), text) for name, text in texts.items())
    fields = FreeFormFields.model_validate_json(b"{%s}" % b",".join(members))
    for per_sequence in (fields.messages, fields.overrides):
        _expect(not per_sequence or len(per_sequence) == sequences)
    return sum(text.count(b"[") for text in texts.values())


def _expect_empty(value: Any) -> int:
    """The number of brackets in a field that must be null or an empty list."""
    if value is None:
        return 0
    _expect(isinstance(value, simdjson.Array) and len(value) == 0)
    return 1


def _env_id(value: Any) -> int | None:
    if value is None:
        return None
    _expect(type(value) is int and 0 <= value <= MAX_TOKEN_ID)
    env_id: int = value
    return env_id


def _expect(holds: object) -> None:
    if not holds:
        raise _Unusual
