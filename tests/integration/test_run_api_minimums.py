"""Minimum allocations: what every batch holds of an environment, and when one is waited for."""

from __future__ import annotations

import httpx
import pytest

from tests.integration.run_api_calls import (
    disconnect,
    next_batch,
    register_environment,
    send,
    start,
    submit,
)


def environments(http: httpx.Client, *minimums: float | None, batch_size: int = 8) -> None:
    """Environments 0, 1, ... that send groups of 2."""
    start(http, batch_size=batch_size)
    for minimum in minimums:
        register_environment(http, min_batch_allocation=minimum)


def test_a_batch_holds_the_minimum_and_is_the_oldest_that_does(http: httpx.Client) -> None:
    environments(http, None, 0.5)
    submit(http, 1, 2, 3, 4, env_id=0)
    submit(http, 11, 12, 13, env_id=1)
    assert next_batch(http) == [1, 2, 11, 12]


@pytest.mark.parametrize(
    ("minimum", "batch"),
    [
        pytest.param(0.0, [1, 2, 3, 4], id="none"),
        pytest.param(0.1, [1, 2, 3, 4], id="int(8 * 0.1) = 0"),
        pytest.param(0.2, [1, 2, 3, 11], id="one sequence takes a group"),
        pytest.param(0.3, [1, 2, 3, 11], id="int(8 * 0.3) = 2"),
        pytest.param(0.4, [1, 2, 11, 12], id="three sequences take two groups"),
        pytest.param(1.0, [11, 12, 13, 14], id="all"),
    ],
)
def test_at_least_int_of_batch_size_times_minimum(
    http: httpx.Client, minimum: float, batch: list[int]
) -> None:
    environments(http, None, minimum)
    submit(http, 1, 2, 3, 4, env_id=0)
    submit(http, 11, 12, 13, 14, env_id=1)
    assert next_batch(http) == batch


def test_it_is_at_least_not_at_most(http: httpx.Client) -> None:
    environments(http, None, 0.25)
    submit(http, 11, 12, 13, env_id=1)
    submit(http, 1, env_id=0)
    assert next_batch(http) == [11, 12, 13, 1]


def test_several_minimums(http: httpx.Client) -> None:
    environments(http, 0.25, 0.5, None)
    submit(http, 21, 22, 23, 24, env_id=2)
    submit(http, 11, 12, env_id=1)
    assert next_batch(http) is None
    submit(http, 1, env_id=0)
    assert next_batch(http) == [21, 11, 12, 1]


def test_sums_above_one_are_scaled_down(http: httpx.Client) -> None:
    environments(http, 0.75, 0.75)
    submit(http, 1, 2, 3, env_id=0)
    submit(http, 11, 12, env_id=1)
    assert next_batch(http) == [1, 2, 11, 12]


def test_minimums_that_no_batch_holds_together_do_not_stop_the_run(http: httpx.Client) -> None:
    start(http, batch_size=12)
    register_environment(http, group_size=4, min_batch_allocation=0.3)
    register_environment(http, group_size=6, min_batch_allocation=0.5)
    submit(http, 1, 2, 3, size=4, env_id=0)
    submit(http, 11, 12, size=6, env_id=1)
    assert next_batch(http) == [1, 2, 3]
    assert next_batch(http) == [11, 12]


def test_without_data_of_an_environment_with_a_minimum_the_batch_waits(http: httpx.Client) -> None:
    environments(http, None, 0.25)
    submit(http, 1, 2, 3, 4, 5, env_id=0)
    assert next_batch(http) is None
    submit(http, 11, env_id=1)
    assert next_batch(http) == [1, 2, 3, 11]


def test_it_waits_no_longer_once_that_environment_disconnects(http: httpx.Client) -> None:
    environments(http, None, 0.25)
    submit(http, 1, 2, 3, 4, env_id=0)
    assert next_batch(http) is None
    disconnect(http, 1)
    assert next_batch(http) == [1, 2, 3, 4]


def test_data_of_nobody_counts_towards_the_rest(http: httpx.Client) -> None:
    environments(http, 0.5)
    submit(http, 1, 2, 3, 4)
    submit(http, 5, env_id=9)
    assert next_batch(http) is None
    submit(http, 11, 12, env_id=0)
    assert next_batch(http) == [1, 2, 11, 12]


def test_parts_count_towards_the_minimum_once_they_are_a_group(http: httpx.Client) -> None:
    environments(http, None, 0.25)
    submit(http, 1, 2, 3, 4, env_id=0)
    send(http, 11, size=1, env_id=1)
    assert next_batch(http) is None
    send(http, 12, size=1, env_id=1)
    assert next_batch(http) == [1, 2, 3, 11, 12]


def test_all_environments_disconnected(http: httpx.Client) -> None:
    environments(http, 0.5, 0.5)
    submit(http, 1, 2, 3, 4, env_id=0)
    for env_id in (0, 1):
        disconnect(http, env_id)
    assert next_batch(http) == [1, 2, 3, 4]
