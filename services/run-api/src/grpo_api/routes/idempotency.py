"""The key under which a call may be repeated where its answer was lost."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import Header

from grpo_api.errors import Refused

_MAX_KEY_CHARS = 255
_KEY_PATTERN = "^[!-~]+$"
_is_key = re.compile(_KEY_PATTERN).fullmatch

IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=_MAX_KEY_CHARS,
        pattern=_KEY_PATTERN,
        description="names this submission: repeated with the same key it is queued once",
    ),
]


def checked_key(key: str | None) -> str | None:
    """
    Raises:
        Refused: 422, it is no `IdempotencyKey`.
    """
    if key is None or (len(key) <= _MAX_KEY_CHARS and _is_key(key)):
        return key
    problem = f"Idempotency-Key has 1 to {_MAX_KEY_CHARS} visible ASCII characters"
    raise Refused(
        422, [{"loc": ["header", "idempotency-key"], "msg": problem, "type": "invalid_key"}]
    )
