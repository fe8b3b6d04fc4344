"""Builds queues and environments of a run, for the tests of planning."""

from __future__ import annotations

from hypothesis import strategies as st

from grpo_api.planning.batch_plan import Bundle, StoredGroup
from grpo_api.planning.run_view import Environment
from grpo_core.wire.run_api import EnvironmentRegistration


def stored(id_: int, sequences: int) -> StoredGroup:
    return StoredGroup(id_, sequences, stored_bytes=10)


def bundle(id_: int, env_id: int | None, *sizes: int) -> Bundle:
    return Bundle(id_, env_id, tuple(stored(id_, size) for size in sizes))


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


def queues(min_size: int, max_size: int, largest: int) -> st.SearchStrategy[list[Bundle]]:
    """Draws bundles of one or two parts, from senders 0 and 1 and an unregistered one."""
    sizes = st.lists(st.integers(1, largest), min_size=1, max_size=2)
    drawn = st.tuples(st.sampled_from([0, 1, None]), sizes)
    return st.lists(drawn, min_size=min_size, max_size=max_size).map(
        lambda entries: [bundle(i, env_id, *sizes) for i, (env_id, sizes) in enumerate(entries)]
    )
