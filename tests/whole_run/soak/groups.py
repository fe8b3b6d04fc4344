"""Groups that are unique, and what the journals of the soak name them."""

from __future__ import annotations

import base64
import hashlib
import json
import random
from collections.abc import Sequence

from grpo_core.wire.fields import MASKED
from grpo_core.wire.scored_group import ScoredGroup

_MAX_TOKEN = 150_000
_SHORT_TOKENS = 6
_LONG_EVERY, _LONG_TOKENS = 25, 400
"""One group in 25 is large enough to be sent gzip-encoded."""
_HUGE_EVERY, _PADDING_BYTES = 150, 1_200_000
"""One group in 150 is above 1 MiB even compressed, so run-api stores it in pieces."""


class GroupMaker:
    """Creates groups whose sequences start with sender, process number and sequence number.

    Args:
        life: number of this process among the sender's processes
    """

    def __init__(self, sender: int, life: int, seed: int) -> None:
        self._origin = [sender, life]
        self._dice = random.Random(f"{seed}/{sender}/{life}")
        self._made = 0

    def make(self, size: int, env_id: int | None) -> ScoredGroup:
        """A group of `size` sequences, each with one prompt token."""
        self._made += 1
        length = _SHORT_TOKENS if self._made % _LONG_EVERY else _LONG_TOKENS
        draw = self._dice.randrange
        tokens = [
            [*self._origin, self._made, i, *(draw(_MAX_TOKEN) for _ in range(length))]
            for i in range(size)
        ]
        return ScoredGroup(
            tokens=tokens,
            masks=[[MASKED, *sequence[1:]] for sequence in tokens],
            scores=[self._dice.random() for _ in tokens],
            env_id=env_id,
            group_overrides=None if self._made % _HUGE_EVERY else self._padding(),
        )

    def _padding(self) -> dict[str, str]:
        """Random text. Compression only removes the overhead of base64."""
        return {"padding": base64.b64encode(self._dice.randbytes(_PADDING_BYTES)).decode()}


def digest(group: ScoredGroup) -> str:
    return _digest(json.dumps(group.tokens))


def content_digest(groups: Sequence[ScoredGroup]) -> str:
    """Digest of a batch's whole content, in order."""
    return _digest("\n".join(group.model_dump_json() for group in groups))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


READY = "ready"
"""What environments and trainer print once they exit cleanly on SIGTERM."""
REPEATED = "repeat answered like the first call"
OTHER_BODY_REFUSED = "other body under a used key refused"
