"""Recognises groups, and whole batches, that this process was given before."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from grpo_core.wire import RolloutFacts, ScoredGroup
from grpo_trainer.errors import DuplicatedBatch

REMEMBERED_BATCHES = 300
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class _Seen:
    step: int
    groups: frozenset[bytes]


class RecentBatches:
    """Digests of the groups of the last 300 batches: 16 bytes a group, whatever its length."""

    def __init__(self, remembered: int = REMEMBERED_BATCHES) -> None:
        self._seen: deque[_Seen] = deque(maxlen=remembered)
        self._lone_repeats = 0

    def count_repeats(self, groups: Sequence[ScoredGroup], step: int) -> int:
        """How many of these groups were in an earlier batch, or twice in this one.

        Raises:
            DuplicatedBatch: all of them were in one earlier batch. Training on them again would
                take a second step on samples whose gain is spent. A batch of one group may be an
                environment's repeat of a submission whose answer was lost, so its second counts.
        """
        digests = [digest(group) for group in groups]
        batch = frozenset(digests)
        for seen in self._seen:
            if batch <= seen.groups and self._is_more_than_a_lost_answer(batch):
                raise DuplicatedBatch(
                    f"step {step}: all {len(groups)} groups of this batch were in the batch of "
                    f"step {seen.step}, with the same tokens, logprobs and scores. Look in "
                    "run-api's log for a batch delivered twice, and at the environments for one "
                    "that sends its groups again; nothing was trained on this batch"
                )
        known = frozenset().union(*(seen.groups for seen in self._seen))
        self._seen.append(_Seen(step, batch))
        return sum(d in known for d in batch) + len(digests) - len(batch)

    def _is_more_than_a_lost_answer(self, batch: frozenset[bytes]) -> bool:
        if len(batch) > 1:
            return True
        self._lone_repeats += 1
        return self._lone_repeats > 1


def digest(group: ScoredGroup) -> bytes:
    """Of what makes a group itself: tokens, logprobs, scores, and the seconds it took to sample
    where the environment says. Those tell two groups of a small model apart that came out alike."""
    state = blake2b(digest_size=_DIGEST_BYTES)
    logprobs = group.inference_logprobs or []
    seconds = RolloutFacts.of(group).generation_seconds
    for tokens in group.tokens:
        state.update(_framed(array("q", tokens)))
    for values in (*logprobs, group.scores, [] if seconds is None else [seconds]):
        state.update(_framed(array("d", values)))
    return state.digest()


def _framed(values: array[int] | array[float]) -> bytes:
    """With their number ahead, so that no two sequences of lists make the same bytes."""
    return len(values).to_bytes(8, "little") + values.tobytes()
