"""Registers trainers: a new batch size is held against what the run has, then committed."""

from __future__ import annotations

from grpo_api.errors import Refused, StoreUnavailable
from grpo_api.planning.quotas import batch_size_conflicts
from grpo_api.store import RunStore
from grpo_api.store.records import BatchSizeDiffers, Registered
from grpo_core.wire.run_api import Registration


async def enrol_trainer(store: RunStore, registration: Registration) -> Registered:
    """What `POST /register` does.

    Raises:
        Refused: 409, what the run holds cannot be served in batches of the new size.
        StoreUnavailable: Redis is away, or the run changed while the new size was checked.
    """
    outcome = await store.trainer.register(registration)
    if isinstance(outcome, BatchSizeDiffers):
        await _check_batch_size(store, registration.batch_size, outcome)
        outcome = await store.trainer.register(registration, approved=outcome.fingerprint)
    if isinstance(outcome, BatchSizeDiffers):
        raise StoreUnavailable("the run changed while its batch size was; register again")
    return outcome


async def _check_batch_size(store: RunStore, batch_size: int, differs: BatchSizeDiffers) -> None:
    run = await store.environments.view()
    group_size_of = {e.env_id: e.registration.group_size for e in run.connected()}
    reasons = batch_size_conflicts(batch_size, group_size_of, run.counters.queued)
    if differs.unacknowledged:
        reasons.insert(
            0,
            f"batches of {differs.current} sequences that are not acknowledged yet: "
            f"{differs.unacknowledged}",
        )
    if reasons:
        raise Refused(
            409,
            f"batch_size {batch_size} differs from this run's {differs.current}, and "
            f"{'; '.join(reasons)}; register with batch_size {differs.current}, use another run "
            "id, or clear the run with GET /reset_data",
        )
