"""`/batch`: exact, oldest first, with every minimum. Planning itself: `unit/api/test_batching`."""

from __future__ import annotations

import httpx

from tests.integration.run_api_calls import (
    disconnect,
    next_batch,
    register_environment,
    send,
    start,
    status,
    submit,
)


def test_batches_are_exact_oldest_first_and_count_as_steps_once_delivered(
    http: httpx.Client,
) -> None:
    start(http)
    submit(http, *range(7))
    assert status(http) == (0, 7)
    assert next_batch(http) == [0, 1]
    assert status(http) == (1, 5)
    assert [next_batch(http) for _ in range(3)] == [[2, 3], [4, 5], None]
    assert status(http) == (3, 1)


def environments(http: httpx.Client, *minimums: float | None) -> None:
    """Environments 0, 1, ... that send groups of 2 for batches of 8."""
    start(http, batch_size=8)
    for minimum in minimums:
        register_environment(http, min_batch_allocation=minimum)


def test_a_batch_is_the_oldest_that_holds_every_minimum(http: httpx.Client) -> None:
    environments(http, 0.25, 0.5, None)
    submit(http, 21, 22, 23, 24, env_id=2)
    submit(http, 11, 12, 13, env_id=1)
    assert next_batch(http) is None
    send(http, 1, size=1, env_id=0)
    assert next_batch(http) is None
    send(http, 2, size=1, env_id=0)  # its parts are a group now
    assert next_batch(http) == [21, 11, 12, 1, 2]


def test_a_minimum_holds_batches_back_until_its_environment_disconnects(http: httpx.Client) -> None:
    environments(http, None, 0.25)
    submit(http, 1, 2, 3, 4, env_id=0)
    assert next_batch(http) is None
    disconnect(http, 1)
    assert next_batch(http) == [1, 2, 3, 4]
