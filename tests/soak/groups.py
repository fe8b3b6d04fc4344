"""Groups that are unique by construction, and the digest by which they are recognised."""

from __future__ import annotations

import base64
import hashlib
import json
import random
from collections.abc import Sequence

from grpo_core.wire import MASKED, ScoredGroup

MAX_TOKEN = 150_000
_LONG_EVERY = 25
_SHORT_TOKENS, _LONG_TOKENS = 6, 400
"""One group in 25 is long enough to be sent compressed."""
_HUGE_EVERY, _PADDING_BYTES = 150, 1_200_000
"""One in 150 is so large when compressed that run-api stores it in pieces (from 1 MiB)."""
_DIGEST_BYTES = 12


class GroupMaker:
    """Every sequence starts with who made it, in which life, and its ordinal in that life.

    Args:
        sender: number of the environment.
        life: how often its process has been started.
    """

    def __init__(self, sender: int, life: int, seed: int) -> None:
        self._sender, self._life = sender, life
        self._random = random.Random(f"{seed}/{sender}/{life}")
        self._made = 0

    def make(self, size: int, env_id: int | None) -> ScoredGroup:
        """A group of `size` sequences, of one prompt token each."""
        self._made += 1
        length = _LONG_TOKENS if self._made % _LONG_EVERY == 0 else _SHORT_TOKENS
        tokens = [
            [self._sender, self._life, self._made, index, *self._random_tokens(length)]
            for index in range(size)
        ]
        return ScoredGroup(
            tokens=tokens,
            masks=[[MASKED, *sequence[1:]] for sequence in tokens],
            scores=[self._random.random() for _ in tokens],
            env_id=env_id,
            group_overrides=self._padding() if self._made % _HUGE_EVERY == 0 else None,
        )

    def _padding(self) -> dict[str, str]:
        """What does not compress, beyond the third that base64 adds."""
        noise = self._random.randbytes(_PADDING_BYTES)
        return {"padding": base64.b64encode(noise).decode()}

    def _random_tokens(self, count: int) -> list[int]:
        return [self._random.randrange(MAX_TOKEN) for _ in range(count)]


def digest(group: ScoredGroup) -> str:
    """Names a group by its tokens."""
    return digest_of(json.dumps(group.tokens))


def content_digest(groups: Sequence[ScoredGroup]) -> str:
    """Names a batch by everything in it, in its order."""
    return digest_of("\n".join(group.model_dump_json() for group in groups))


def digest_of(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()
