"""Takes batches from run-api as a trainer."""

from __future__ import annotations

from grpo_core.clients.run_api import LeasedBatch, TrainerClient
from tests.support.wait import wait_for


def next_batch(trainer: TrainerClient) -> LeasedBatch:
    """Wait for the batch after the last one. Raises the errors of `TrainerClient.poll`."""
    found = wait_for(trainer.poll, lambda found: isinstance(found, LeasedBatch))
    assert isinstance(found, LeasedBatch)
    return found
