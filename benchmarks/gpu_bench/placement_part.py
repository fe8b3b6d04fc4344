"""Trainer and server on one GPU: both at once against one after the other.

The server decodes a number of requests and the trainer takes a number of steps, each published into
the served weights. The numbers are such that both take about as long alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from benchmarks.gpu_bench.attached import attached
from benchmarks.gpu_bench.bench import TIME_IS_UP, Bench, at_most
from benchmarks.gpu_bench.budget import Deadline
from benchmarks.gpu_bench.load import BackgroundLoad, background_load
from benchmarks.gpu_bench.rates import synchronize
from benchmarks.gpu_bench.servers import Server, ServerName
from benchmarks.gpu_bench.train_batch import random_batch, trained_lengths
from benchmarks.gpu_bench.train_variants import (
    Variant,
    optimizer_beside_server,
    optimizer_name,
)
from benchmarks.gpu_bench.trainee import Trainee, trainee_of
from grpo_trainer.config.forward import ForwardOptions
from grpo_trainer.weight_sync.shared_memory.shared_vllm import SharedVllm

GOAL = 1.0
"""Both at once take no longer than one after the other."""
WARM_UPS = 2


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

    def __init__(self, bench: Bench, server: Server, sync: SharedVllm, trainee: Trainee) -> None:
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
        for _ in range(WARM_UPS):
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
            self._sync.apply(self._trainee.optimizer, self._taken)
            synchronize(self._bench.device)
            self._taken += 1
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


def measure(bench: Bench, deadline: Deadline) -> None:
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
            _report(bench, both, rounds, optimizer_name(variant.optimizer))


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


def _report(bench: Bench, both: _Both, rounds: _Rounds, optimizer: str) -> None:
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
    bench.say("placement", name, "", ratios, goal=at_most(GOAL))
