"""Server and trainer on one GPU: memory, publication, and both at work at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_bench.bench import (
    GIB,
    MS_PER_S,
    NO_GPU,
    TIME_IS_UP,
    GpuBench,
    Stopwatch,
    at_most,
    give_memory_back,
    settled_used_bytes,
    synchronize,
)
from benchmarks.gpu_bench.report import Limit, number
from benchmarks.gpu_bench.servers import GpuServer, ServerName
from benchmarks.gpu_bench.serving import BackgroundLoad, background_load
from benchmarks.gpu_bench.settings import GpuDeadline, percentile, publication_bytes
from benchmarks.gpu_bench.training import (
    Trainee,
    Variant,
    optimizer_beside_server,
    optimizer_name,
    random_batch,
    trained_lengths,
    trainee_of,
)
from grpo_core.clients.inference import BridgeClient
from grpo_core.errors import GrpoError
from grpo_core.tree.trainer import ForwardOptions
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.optim.master_update import MasterUpdate
from grpo_trainer.optim.rules import AdamW32, State, StepOptions
from grpo_trainer.weight_sync.attachment import ServerConnection
from grpo_trainer.weight_sync.shared import SharedVllm

LEASE_S = 60.0


@contextlib.contextmanager
def attached(server: GpuServer, model: str) -> Iterator[tuple[SharedVllm, Any]]:
    """The weights' sync, and the policy of views."""
    sync = SharedVllm(ServerConnection(BridgeClient(server.url)), model, lease_s=LEASE_S)
    try:
        yield sync, sync.load_policy().eval()
    finally:
        sync.close()


MAY_GROW = 0.1
"""Of the weights' size: tables, contexts and the driver's rounding. A copy would be 1."""


def measure_memory(bench: GpuBench, deadline: GpuDeadline) -> None:  # noqa: ARG001
    if not bench.on_gpu:
        bench.leave_out("memory", NO_GPU)
        return
    server = bench.server(ServerName.SHARED)
    give_memory_back()
    weights = bench.shape.parameters * bench.dtype.itemsize
    cache = bench.workload.cache_bytes
    with_server, allocated = settled_used_bytes(), torch.cuda.memory_allocated()
    with attached(server, str(bench.model)):
        torch.cuda.synchronize()
        grown = settled_used_bytes() - with_server
        held = torch.cuda.memory_allocated() - allocated
    size = Limit(value=weights / GIB, what="size of the weights")
    both = Limit(value=(weights + cache) / GIB, what="weights and cache")
    server_s = (with_server - bench.used_before) / GIB
    bench.say("memory", "used before any server", "GiB", [bench.used_before / GIB])
    bench.say("memory", "added by the server", "GiB", [server_s], limit=both)
    bench.say("memory", "added by a trainer that attaches", "GiB", [grown / GIB], limit=size)
    share, goal = [grown / weights], at_most(MAY_GROW)
    bench.say("memory", "the same over the size of the weights", "", share, goal=goal)
    bench.say("memory", "allocated by torch in the trainer", "GiB", [held / GIB], limit=size)


VLLM_SLEEP_MS = 20.0
"""`await asyncio.sleep(0.02)` at the end of vLLM's AsyncLLM.pause_generation (0.24 to 0.32)."""
GOAL_MS = 10.0
"""Of a publication of the 7B model, beyond vLLM's sleep."""
WARM_UP_PUBLICATIONS = 3
MIN_PUBLICATIONS = 10
NUDGE = 1e-3


class UpdateNotServed(GrpoError):
    """The served weights are not what was written, so that a time would say nothing."""


class Nudge(MasterUpdate):
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
    ) -> None:
        master.add_(self._by)


class TimedOptimizer(MasterOptimizer):
    """Publishes nothing at all while `writes` is off. `written`: times the last write."""

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device) -> None:
        super().__init__(
            parameters,
            learning_rate=lambda _: 1.0,
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

    def write_into_parameters(self, *may_write: Any) -> None:
        if not self.writes:
            return
        self.written = Stopwatch(self._device)
        with self.written:
            super().write_into_parameters(*may_write)


@dataclass
class _Times:
    """Milliseconds. `idle`: where nothing is written; `device`: of the writes alone."""

    published: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)


class _Publisher:
    """Publishes again and again, in versions that count up."""

    def __init__(self, bench: GpuBench, sync: SharedVllm, policy: Any) -> None:
        self._bench = bench
        self._sync = sync
        self._policy = policy
        self._optimizer = TimedOptimizer(policy.parameters(), bench.device)
        self._step = 0
        sync.start(self._optimizer, self._step)

    def times(self, deadline: GpuDeadline) -> _Times:
        times = _Times()
        for index in range(self._bench.workload.publications + WARM_UP_PUBLICATIONS):
            if index >= WARM_UP_PUBLICATIONS + MIN_PUBLICATIONS and deadline.passed:
                break
            into = times if index >= WARM_UP_PUBLICATIONS else _Times()
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
        self._optimizer.step(self._step)
        self._step += 1
        return self._sync.publish(self._optimizer, self._step).seconds * MS_PER_S

    def _check(self) -> None:
        unwritten = self._optimizer.unwritten_parameters()
        if unwritten:
            raise UpdateNotServed(
                f"{unwritten} parameters are not their masters after a publication"
            )


def _touch(policy: Any) -> None:
    """A gradient for every parameter, by the hooks that a real one would come in by."""
    first = [parameter.view(-1)[0].float() for parameter in policy.parameters()]
    torch.stack(first).sum().backward()  # type: ignore[no-untyped-call]


def measure_publications(bench: GpuBench, deadline: GpuDeadline) -> None:
    server = bench.server(ServerName.SHARED)
    if bench.end.passed:
        bench.leave_out("publish", TIME_IS_UP)
        return
    with attached(server, str(bench.model)) as (sync, policy):
        publisher = _Publisher(bench, sync, policy)
        _report_publications(bench, publisher.times(deadline.part_of(0.4)), "idle")
        times = _under_load(bench, server, publisher, deadline)
        at_once = bench.workload.load.concurrency
        _report_publications(bench, times, f"{at_once} generations under way")


def _under_load(
    bench: GpuBench, server: GpuServer, publisher: _Publisher, deadline: GpuDeadline
) -> _Times:
    with background_load(server.url, bench.workload.load) as load:
        times = publisher.times(deadline)
        load.check()
    return times


def _report_publications(bench: GpuBench, times: _Times, where: str) -> None:
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


PLACEMENT_GOAL = 1.0
"""Both at once take no longer than one after the other."""
WARM_UP_STEPS = 2


@dataclass
class _Rounds:
    """Tokens per second, and seconds of all the work."""

    decode_alone: list[float] = field(default_factory=list)
    decode_beside: list[float] = field(default_factory=list)
    train_alone: list[float] = field(default_factory=list)
    train_beside: list[float] = field(default_factory=list)
    one_after_the_other_s: list[float] = field(default_factory=list)
    together_s: list[float] = field(default_factory=list)


class _Both:
    """A server that decodes and a trainer that trains the weights it serves."""

    def __init__(
        self, bench: GpuBench, server: GpuServer, sync: SharedVllm, trainee: Trainee
    ) -> None:
        self.step_tokens = sum(trained_lengths(trainee.batch))
        self.steps = self.requests = 1
        self._bench = bench
        self._server = server
        self._sync = sync
        self._trainee = trainee
        self._taken = 0
        sync.start(trainee.optimizer, self._taken)

    def calibrate(self) -> None:
        """Choose how many steps, and how many requests, take about `placement_s` alone."""
        workload = self._bench.workload
        for _ in range(WARM_UP_STEPS):
            step_s = self.train(1)
        self.steps = max(2, round(workload.placement_s / step_s))
        self.requests = workload.load.concurrency
        self.decode()  # warms up
        _, decode_s = self.decode()
        self.requests *= max(1, round(workload.placement_s / decode_s))

    def train(self, steps: int) -> float:
        """Seconds until the last of them was served."""
        began = time.monotonic()
        for _ in range(steps):
            self._trainee.gather(self._taken)
            self._trainee.optimizer.step(self._taken)
            self._taken += 1
            self._sync.publish(self._trainee.optimizer, self._taken)
            synchronize(self._bench.device)
        return time.monotonic() - began

    def decode(self, trains: bool = False) -> tuple[int, float]:
        """Tokens of all requests, and seconds. Args: trains: all the while"""
        began = time.monotonic()
        with self._load(self.requests) as load:
            while trains and not load.is_over:
                self.train(1)
            load.wait()
        return load.log.tokens, load.log.last_s - began

    def train_beside_decoding(self) -> float:
        """Seconds of all steps."""
        with self._load(None) as load:
            self.train(1)
            seconds = self.train(self.steps)
            load.check()
        return seconds

    def together(self) -> float:
        """Seconds until all requests are answered and all steps taken."""
        began = time.monotonic()
        with self._load(self.requests) as load:
            trained_s = self.train(self.steps)
            load.wait()
        return max(trained_s, load.log.last_s - began)

    @contextmanager
    def _load(self, requests: int | None) -> Iterator[BackgroundLoad]:
        work = self._bench.workload.load
        with background_load(self._server.url, work, requests) as load:
            yield load


def measure_placement(bench: GpuBench, deadline: GpuDeadline) -> None:
    server = bench.server(ServerName.SHARED)
    if bench.end.passed:
        bench.leave_out("placement", TIME_IS_UP)
        return
    variant = Variant("default", ForwardOptions(), optimizer_beside_server(bench.size))
    batch = random_batch(bench.shape, bench.workload.train, seed=0)
    with attached(server, str(bench.model)) as (sync, policy):
        both = _Both(bench, server, sync, trainee_of(policy, variant, batch))
        both.calibrate()
        rounds = _Rounds()
        for number in range(bench.workload.placement_rounds):
            if number and deadline.passed:
                break
            _round(both, rounds)
            _report_rounds(bench, both, rounds, optimizer_name(variant.optimizer))


def _round(both: _Both, rounds: _Rounds) -> None:
    trained = both.steps * both.step_tokens
    tokens, decode_s = both.decode()
    rounds.decode_alone.append(tokens / decode_s)
    train_s = both.train(both.steps)
    rounds.train_alone.append(trained / train_s)
    rounds.one_after_the_other_s.append(decode_s + train_s)
    tokens, beside_s = both.decode(trains=True)
    rounds.decode_beside.append(tokens / beside_s)
    rounds.train_beside.append(trained / both.train_beside_decoding())
    rounds.together_s.append(both.together())


def _report_rounds(bench: GpuBench, both: _Both, rounds: _Rounds, optimizer: str) -> None:
    at_once = bench.workload.load.concurrency
    decode, train = f"decoding, {at_once} at once", f"training, {optimizer}, published every step"
    bench.say("placement", f"{decode}, alone", "tokens/s", rounds.decode_alone)
    bench.say("placement", f"{decode}, beside training", "tokens/s", rounds.decode_beside)
    bench.say("placement", f"{train}, alone", "tokens/s", rounds.train_alone)
    bench.say("placement", f"{train}, beside decoding", "tokens/s", rounds.train_beside)
    work = f"{both.requests} requests and {both.steps} steps"
    bench.say("placement", f"{work}, one after the other", "s", rounds.one_after_the_other_s)
    bench.say("placement", f"{work}, both at once", "s", rounds.together_s)
    pairs = zip(rounds.together_s, rounds.one_after_the_other_s, strict=True)
    ratios = [together / apart for together, apart in pairs]
    name = "both at once over one after the other"
    bench.say("placement", name, "", ratios, goal=at_most(PLACEMENT_GOAL))
