"""Environments that pause by `/status-env` and a trainer never wait for each other forever."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.planning.batch_plan import Kind, plan_batch
from grpo_api.planning.run_view import (
    Environment,
    Limits,
    RunView,
    environment_status,
)
from tests.unit.api.builders import environment

UNLIMITED = Limits(queued_groups=2**53, queued_bytes=2**53)
BATCHES = 12
BATCHES_OFF_POLICY = 1
"""The smallest limit of an environment: it pauses when it sees one batch."""
SPEEDS = (0.05, 0.3, 1.0)


class SimulatedRun:
    """run-api's planning, without Redis or HTTP."""

    def __init__(self, batch_size: int, environments: list[Environment]) -> None:
        self.batch_size = batch_size
        self.environments = environments
        self.queue: list[Kind] = []

    def view(self) -> RunView:
        queued = Counter(self.queue)
        largest = max((kind.sequences for kind in queued), default=1)
        return RunView(self.environments, 0, self.batch_size, queued, largest, 0, 0, num_steps=10)

    def may_send(self, own: Environment) -> bool:
        """The rule by which Atropos environments and ours pause."""
        queue_size = environment_status(own, self.view(), UNLIMITED).queue_size
        size = own.registration.group_size
        return queue_size * size < BATCHES_OFF_POLICY * self.batch_size

    def take_batch(self) -> list[Kind] | None:
        chosen = plan_batch(self.queue, self.view().demand())
        if chosen is None:
            return None
        batch = [self.queue[i] for i in chosen]
        self.queue = [kind for i, kind in enumerate(self.queue) if i not in chosen]
        return batch


@st.composite
def runs(draw: st.DrawFn) -> SimulatedRun:
    """Group sizes that fit one batch together, with minimums that may not fit."""
    batch_size = draw(st.sampled_from([8, 12, 16, 24, 40]))
    divisors = [size for size in range(1, batch_size + 1) if batch_size % size == 0]
    sizes = draw(st.lists(st.sampled_from(divisors), min_size=1, max_size=4))
    minimums = [draw(st.sampled_from([None, 0.2, 0.5, 0.8])) for _ in sizes]
    shares = enumerate(zip(sizes, minimums, strict=True))
    return SimulatedRun(
        batch_size, [environment(i, size, minimum=minimum) for i, (size, minimum) in shares]
    )


@settings(max_examples=60)
@given(run=runs(), dice=st.randoms(use_true_random=True))
def test_a_batch_comes_out_however_tightly_environments_pace(
    run: SimulatedRun, dice: random.Random
) -> None:
    speeds = [dice.choice(SPEEDS) for _ in run.environments]
    for _ in range(BATCHES):
        while (batch := run.take_batch()) is None:
            willing = [own for own in run.environments if run.may_send(own)]
            assert willing, f"everybody pauses at {run.view()}"
            sender = dice.choices(willing, [speeds[own.env_id] for own in willing])[0]
            run.queue.append(sender.kind)
        assert sum(kind.sequences for kind in batch) == run.batch_size
        most = len(run.environments) * (BATCHES_OFF_POLICY + 1) * run.batch_size
        assert sum(kind.sequences for kind in run.queue) <= most
