"""Hands batches that were sampled just now to the trainer, in the place of run-api."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from grpo_core.clients.run_api import LeasedBatch
from grpo_core.wire.run_api import EnvironmentCount, Registration, RunStatus
from grpo_core.wire.scored_group import ScoredGroup
from grpo_offline.errors import RolloutsFail

RUN_UUID = "offline"
"""The trainer's checkpoints name the run that their batches came from. Here each directory holds
one run."""


class InProcessQueue:
    """A `BatchQueue`. Batches are numbered as the optimizer steps are: the first one is 1."""

    base_url = "in this process"
    run_uuid = RUN_UUID

    def __init__(self) -> None:
        self._batches: deque[list[ScoredGroup]] = deque()
        self._handed_out = 0

    def put(self, batches: Sequence[list[ScoredGroup]]) -> None:
        self._batches.extend(batches)

    def status(self) -> RunStatus:
        return RunStatus(current_step=self._handed_out, queue_size=0, run_uuid=RUN_UUID)

    def register(self, registration: Registration) -> int:  # noqa: ARG002
        return 0

    def resume_after(self, batch_id: int) -> None:
        self._handed_out = batch_id

    def next_batch(
        self,
        deadline_s: float,  # noqa: ARG002
        meanwhile: Callable[[], None] = lambda: None,  # noqa: ARG002
        batches_left: int | None = None,  # noqa: ARG002
        look: Callable[[EnvironmentCount], None] = lambda _: None,  # noqa: ARG002
    ) -> LeasedBatch:
        if not self._batches:
            raise RolloutsFail(
                "the trainer cannot train on a batch of this iteration and has no other one; the "
                "log names the reason, and the directory quarantine/ of the run holds the batch. "
                "To sample the iteration again, delete its file below sampled/ and resume"
            )
        groups = self._batches.popleft()
        self._handed_out += 1
        return LeasedBatch(self._handed_out, groups, [None] * len(groups))

    def request_ahead(
        self,
        batches_left: int,
        prepare: Callable[[LeasedBatch], None] = lambda _: None,
    ) -> None:
        """Nothing waits ahead: the next batch may be sampled from the next weights."""

    def acknowledge(self, batch_id: int) -> None:
        """Nothing is kept."""
