"""shared_vllm: how long the pause → write → resume of a publication takes.

Beside each publication one that writes nothing: what it takes is vLLM's pause and the way there.
What is published is a step's result as the trainer leaves it, a staged copy in the served type; the
step itself is none of this, so the masters are only nudged.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_bench.attached import attached
from benchmarks.gpu_bench.bench import MS_PER_S, TIME_IS_UP, Bench, at_most
from benchmarks.gpu_bench.budget import Deadline
from benchmarks.gpu_bench.counts import percentile, publication_bytes
from benchmarks.gpu_bench.figures import Limit, number
from benchmarks.gpu_bench.load import background_load
from benchmarks.gpu_bench.rates import Stopwatch, synchronize
from benchmarks.gpu_bench.servers import Server, ServerName
from grpo_core.errors import GrpoError
from grpo_trainer.optim.adamw import AdamW32, State, StepOptions
from grpo_trainer.optim.masters import Masters
from grpo_trainer.optim.optimizer import MasterOptimizer
from grpo_trainer.weight_sync.shared_memory.shared_vllm import SharedVllm

VLLM_SLEEP_MS = 20.0
"""`await asyncio.sleep(0.02)` at the end of vLLM's AsyncLLM.pause_generation (0.24 to 0.32)."""
GOAL_MS = 10.0
"""Of a publication of the 7B model, beyond vLLM's sleep."""
WARM_UPS = 3
MIN_PUBLICATIONS = 10
NUDGE = 1e-3


class NotPublished(GrpoError):
    """The served weights are not what was written, so that a time would say nothing."""


class Nudge(Masters):
    """Costs little and keeps nothing: up in one step, down in the next."""

    def __init__(self) -> None:
        super().__init__(AdamW32())
        self._by = -NUDGE

    def begin_step(self, step: int) -> None:  # noqa: ARG002
        self._by = -self._by

    def initial_state(self, master: Tensor) -> State:  # noqa: ARG002
        return {}

    def restored(self, saved: State, master: Tensor) -> State:  # noqa: ARG002
        return saved

    def step(
        self,
        master: Tensor,
        gradient: Tensor,  # noqa: ARG002
        state: State,  # noqa: ARG002
        options: StepOptions,  # noqa: ARG002
        served: torch.dtype,
    ) -> Tensor | None:
        master.add_(self._by)
        return None if served == master.dtype else master.to(served)


class TimedOptimizer(MasterOptimizer):
    """Publishes nothing at all while `writes` is off. `written`: times the last write."""

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device) -> None:
        super().__init__(
            parameters,
            lr=1.0,
            warmup_steps=0,
            weight_decay=0.0,
            max_grad_norm=1.0,
            update=Nudge(),
        )
        self.writes = True
        self.written = Stopwatch(device)
        self._device = device

    def step(self, step: int) -> float:
        norm = super().step(step) if self.writes else 0.0
        synchronize(self._device)  # else a publication would wait for the rest of the step
        return norm

    def write_into_parameters(self) -> None:
        if not self.writes:
            return
        self.written = Stopwatch(self._device)
        with self.written:
            super().write_into_parameters()


@dataclass
class _Times:
    """Milliseconds. `idle`: where nothing is written; `device`: of the writes alone."""

    published: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)


class _Publisher:
    """Publishes again and again, in versions that count up."""

    def __init__(self, bench: Bench, sync: SharedVllm, policy: Any) -> None:
        self._bench = bench
        self._sync = sync
        self._policy = policy
        self._optimizer = TimedOptimizer(policy.parameters(), bench.device)
        self._step = 0
        sync.start(self._optimizer, self._step)

    def times(self, deadline: Deadline) -> _Times:
        times = _Times()
        for index in range(self._bench.workload.publications + WARM_UPS):
            if index >= WARM_UPS + MIN_PUBLICATIONS and deadline.passed:
                break
            into = times if index >= WARM_UPS else _Times()
            into.idle.append(self._one(writes=False))
            into.published.append(self._one(writes=True))
            into.device.append(self._optimizer.written.seconds * MS_PER_S)
        self._check()
        return times

    def _one(self, writes: bool) -> float:
        time.sleep(self._bench.workload.between_publications_s)
        self._optimizer.writes = writes
        if writes:
            _touch(self._policy)
        published = self._sync.apply(self._optimizer, self._step)
        self._step += 1
        return published.publish_s * MS_PER_S

    def _check(self) -> None:
        unwritten = self._optimizer.unwritten_parameters()
        if unwritten:
            raise NotPublished(f"{unwritten} parameters are not their masters after a publication")


def _touch(policy: Any) -> None:
    """A gradient for every parameter, by the hooks that a real one would come in by."""
    first = [parameter.view(-1)[0].float() for parameter in policy.parameters()]
    torch.stack(first).sum().backward()  # type: ignore[no-untyped-call]


def measure(bench: Bench, deadline: Deadline) -> None:
    server = bench.server(ServerName.SHARED)
    if bench.end.passed:
        bench.leave_out("publish", TIME_IS_UP)
        return
    with attached(server, str(bench.model)) as (sync, policy):
        publisher = _Publisher(bench, sync, policy)
        _report(bench, publisher.times(deadline.part_of(0.4)), "idle")
        _report(bench, _under_load(bench, server, publisher, deadline), _load_named(bench))


def _under_load(bench: Bench, server: Server, publisher: _Publisher, deadline: Deadline) -> _Times:
    with background_load(server.url, bench.workload.load) as load:
        times = publisher.times(deadline)
        load.check()
    return times


def _load_named(bench: Bench) -> str:
    return f"{bench.workload.load.concurrency} generations under way"


def _report(bench: Bench, times: _Times, where: str) -> None:
    count = len(times.published)
    bench.say("publish", f"publication, {where}, p50", "ms", times.published)
    p99 = percentile(times.published, 99)
    bench.say_value("publish", f"publication, {where}, p99", "ms", p99, count)
    bench.say("publish", f"the same with nothing written, {where}, p50", "ms", times.idle)
    p99 = percentile(times.idle, 99)
    bench.say_value("publish", f"the same with nothing written, {where}, p99", "ms", p99, count)
    more = [ours - idle for ours, idle in zip(times.published, times.idle, strict=True)]
    bench.say("publish", f"publication less the one beside it, {where}", "ms", more)
    beyond = [value - VLLM_SLEEP_MS for value in times.published]
    goal = at_most(GOAL_MS) if bench.size == "7b" else None
    name = f"publication beyond vLLM's sleep of {VLLM_SLEEP_MS:g} ms, {where}"
    bench.say("publish", name, "ms", beyond, goal=goal)
    moved = publication_bytes(bench.shape, bench.dtype.itemsize)
    at_best = Limit(
        value=moved / bench.rates.bandwidth * MS_PER_S,
        what=f"{number(moved / 1e9)} GB read and written",
    )
    bench.say("publish", f"the write on the device, {where}", "ms", times.device, limit=at_best)
