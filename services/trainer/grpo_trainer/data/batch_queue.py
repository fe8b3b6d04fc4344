"""Where a trainer's batches come from: run-api, or rollouts that were sampled just now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from grpo_core.clients.run_api_answers import LeasedBatch
from grpo_core.wire.run_api import EnvironmentCount, Registration, RunStatus


class BatchQueue(Protocol):
    """See `grpo_core.clients.run_api.TrainerClient`, which is one, for arguments and errors."""

    base_url: str

    @property
    def run_uuid(self) -> str: ...

    def status(self) -> RunStatus: ...

    def register(self, registration: Registration) -> int: ...

    def resume_after(self, batch_id: int) -> None: ...

    def next_batch(
        self,
        deadline_s: float,
        meanwhile: Callable[[], None] = ...,
        batches_left: int | None = None,
        look: Callable[[EnvironmentCount], None] = ...,
    ) -> LeasedBatch: ...

    def request_ahead(
        self, batches_left: int, prepare: Callable[[LeasedBatch], None] = ...
    ) -> None: ...

    def acknowledge(self, batch_id: int) -> None: ...
