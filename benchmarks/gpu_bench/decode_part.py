"""How fast each mode's server decodes beside bare vLLM.

The servers are up side by side and are measured in turns, so that what else the machine does, and
how warm it is, meets all of them; those that are not measured are idle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from benchmarks.gpu_bench.bench import Bench, at_least
from benchmarks.gpu_bench.budget import Deadline
from benchmarks.gpu_bench.completions import NoCompletion
from benchmarks.gpu_bench.counts import BANDWIDTH_H200, decode_limit, mean_context
from benchmarks.gpu_bench.figures import Limit
from benchmarks.gpu_bench.load import decode
from benchmarks.gpu_bench.servers import Server, ServerName

GOALS = {ServerName.SHARED: 0.97, ServerName.PLAIN: 0.97, ServerName.LORA: 0.9}
"""Tokens per second over those of bare vLLM, which serves the model without an adapter."""
MODES = (ServerName.PLAIN, ServerName.SHARED, ServerName.LORA)

Speeds = dict[tuple[ServerName, int], list[float]]
"""Tokens per second by server and concurrency, round by round."""


def measure(bench: Bench, deadline: Deadline) -> None:
    waves = list(_waves(bench.workload.servers_at_once - 1))
    bare: Speeds = defaultdict(list)
    for index, modes in enumerate(waves):
        until = deadline.part_of(1 / (len(waves) - index))
        names = [ServerName.BARE, *modes]
        bench.pool.keep(names)
        bench.start(names)
        for name in names:
            if name in bench.pool.failures:
                bench.leave_out("decode", bench.pool.failures[name], name)
        wave = _Wave(bench, modes, bare)
        wave.measure(until)
        bare = wave.all_of_bare()


def _waves(modes_at_once: int) -> Iterator[Sequence[ServerName]]:
    for start in range(0, len(MODES), modes_at_once):
        yield MODES[start : start + modes_at_once]


class _Wave:
    """Servers that are up side by side.

    Args:
        earlier: speeds of bare vLLM in waves before this one
    """

    def __init__(self, bench: Bench, modes: Sequence[ServerName], earlier: Speeds) -> None:
        self._bench = bench
        self._modes = modes
        self._earlier = earlier
        self._speeds: Speeds = defaultdict(list)
        self._answering = bench.pool.up([ServerName.BARE, *modes])

    def measure(self, until: Deadline) -> None:
        """The first round warms everything up and does not count. What is known after few of them
        is told at once, in case that there will be no more."""
        work = self._bench.workload.decode
        self._round(0)
        for number in range(1, work.rounds + 1):
            for server_name, concurrency, speed in self._round(number):
                self._speeds[server_name, concurrency].append(speed)
            if number == work.min_rounds:
                self._report()
            if number >= work.min_rounds and until.passed:
                break
        self._report()

    def all_of_bare(self) -> Speeds:
        found: Speeds = defaultdict(list)
        for concurrency in self._bench.workload.decode.concurrencies:
            key = ServerName.BARE, concurrency
            found[key] = self._earlier[key] + self._speeds[key]
        return found

    def _round(self, number: int) -> list[tuple[ServerName, int, float]]:
        work = self._bench.workload.decode
        found = []
        for concurrency in work.concurrencies:
            for server in _rotated(self._answering, number):
                try:
                    speed = decode(server.url, concurrency, work.prompt_tokens, work.new_tokens)
                except NoCompletion as error:  # the others are measured on
                    self._bench.leave_out("decode", str(error), server.name)
                    self._answering.remove(server)
                else:
                    found.append((server.name, concurrency, speed))
        return found

    def _report(self) -> None:
        for concurrency in self._bench.workload.decode.concurrencies:
            bare = ServerName.BARE, concurrency
            _say_speed(self._bench, *bare, self._earlier[bare] + self._speeds[bare])
            for mode in self._modes:
                _say_speed(self._bench, mode, concurrency, self._speeds[mode, concurrency])
                self._say_ratio(mode, concurrency)

    def _say_ratio(self, mode: ServerName, concurrency: int) -> None:
        """Round by round. One that stopped answering has fewer of them."""
        ours, theirs = (self._speeds[name, concurrency] for name in (mode, ServerName.BARE))
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=False)]
        if ratios:
            name = f"{mode} over bare vLLM, {concurrency} at once"
            self._bench.say("decode", name, "", ratios, goal=at_least(GOALS[mode]))


def _rotated(servers: Sequence[Server], by: int) -> Sequence[Server]:
    """Nobody is always measured first."""
    first = by % max(1, len(servers))
    return [*servers[first:], *servers[:first]]


def _say_speed(bench: Bench, name: ServerName, concurrency: int, speeds: list[float]) -> None:
    if not speeds:
        return
    work = bench.workload.decode
    context = mean_context(work.prompt_tokens, work.new_tokens)
    number_bytes = bench.dtype.itemsize
    limits = [
        decode_limit(bench.shape, concurrency, context, number_bytes, bandwidth)
        for bandwidth in (bench.rates.bandwidth, BANDWIDTH_H200)
    ]
    what = "memory bandwidth as measured"
    if bench.on_gpu:
        what += f"; {limits[1]:,.0f} by an H200's datasheet"
    label = f"{name}, {concurrency} at once"
    bench.say("decode", label, "tokens/s", speeds, limit=Limit(value=limits[0], what=what))
