"""What the server can be doing, and which of it closes generation."""

from __future__ import annotations

from enum import StrEnum

from grpo_core.wire import PolicyVersion
from grpo_vllm.http.readiness import Refusal


class ServingState(StrEnum):
    """`state` of `GET /bridge/info`."""

    SERVING = "serving"
    PAUSED = "paused"
    """Requests wait; a lease bounds it."""
    AWAITING_WEIGHTS = "awaiting_weights"
    """The engine restarted in the middle of a run and holds other weights than the run's."""
    FAILED = "failed"
    """The same, and no trainer came in time. One may still come."""
    SLEEPING = "sleeping"


_CLOSED_BECAUSE = {
    ServingState.AWAITING_WEIGHTS: "the engine restarted and holds the checkpoint's weights; "
    "waiting for a trainer to write policy version {version} back",
    ServingState.FAILED: "the engine restarted, and no trainer wrote policy version {version} back "
    "in time. Start the trainer again; or start this server with another --run-id, or with "
    "--no-await-weights to serve the checkpoint on disk",
    ServingState.SLEEPING: "the engine sleeps until POST /bridge/wake_up",
}


def refusal_in(state: ServingState, version: PolicyVersion) -> Refusal | None:
    """Why nothing may be generated. None in a pause: it ends by itself, soon."""
    reason = _CLOSED_BECAUSE.get(state)
    if reason is None:
        return None
    hold = state is ServingState.AWAITING_WEIGHTS
    return Refusal(reason.format(version=list(version)), hold)
