"""Builds environments of a run, for the tests of planning."""

from __future__ import annotations

from grpo_api.planning.run_view import Environment
from grpo_core.wire.run_api import EnvironmentRegistration


def environment(
    env_id: int,
    group_size: int = 4,
    *,
    minimum: float | None = None,
    weight: float = 1.0,
    max_token_length: int = 100,
    connected: bool = True,
) -> Environment:
    registration = EnvironmentRegistration(
        max_token_length=max_token_length,
        desired_name="e",
        weight=weight,
        group_size=group_size,
        min_batch_allocation=minimum,
    )
    return Environment(env_id, f"e_{env_id}", connected, registration)
