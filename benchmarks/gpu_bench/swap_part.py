"""lora_only: how long a new adapter takes from its hand-off until it is served, and what decoding
loses meanwhile."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from benchmarks.gpu_bench.bench import MS_PER_S, Bench
from benchmarks.gpu_bench.budget import Deadline
from benchmarks.gpu_bench.completion_log import CompletionLog
from benchmarks.gpu_bench.counts import percentile
from benchmarks.gpu_bench.load import background_load
from benchmarks.gpu_bench.random_adapter import TARGETS, write_random_adapter
from benchmarks.gpu_bench.servers import LORA_RANK, Server, ServerName, load_adapter

MIN_SWAPS = 3
WARM_UP_SWAPS = 1


@dataclass
class _Swaps:
    """Seconds; `windows`: of each from its hand-off on, and as long before."""

    written_s: list[float] = field(default_factory=list)
    served_s: list[float] = field(default_factory=list)
    handed_off_at: list[float] = field(default_factory=list)

    def exactly(self) -> list[tuple[float, float]]:
        pairs = zip(self.handed_off_at, self.served_s, strict=True)
        return [(at, at + seconds) for at, seconds in pairs]

    def around(self, before_s: float, after_s: float) -> list[tuple[float, float]]:
        return [(at - before_s, at + after_s) for at in self.handed_off_at]


def measure(bench: Bench, deadline: Deadline) -> None:
    # The next parts need the other one, and there is room for it.
    server = bench.server(ServerName.LORA, beside=[ServerName.SHARED])
    work = bench.workload
    swaps = _Swaps()
    with background_load(server.url, work.short_load) as load:
        for number in range(work.swaps + WARM_UP_SWAPS):
            if number > MIN_SWAPS and deadline.passed:
                break
            time.sleep(work.between_swaps_s)
            _swap(bench, server, number, swaps if number >= WARM_UP_SWAPS else _Swaps())
            load.check()
        time.sleep(work.between_swaps_s)
    _report(bench, swaps, load.log)


def _swap(bench: Bench, server: Server, number: int, swaps: _Swaps) -> None:
    directory = bench.adapters / f"swap_{number}"
    began = time.monotonic()
    write_random_adapter(bench.shape, LORA_RANK, directory, seed=number + 1)
    handed_off = time.monotonic()
    load_adapter(server.url, directory)
    served = time.monotonic()
    swaps.written_s.append(handed_off - began)
    swaps.served_s.append(served - handed_off)
    swaps.handed_off_at.append(handed_off)


def _report(bench: Bench, swaps: _Swaps, log: CompletionLog) -> None:
    what = f"rank {LORA_RANK} on {' and '.join(TARGETS)}"
    served_ms = [seconds * MS_PER_S for seconds in swaps.served_s]
    bench.say("swap", f"hand-off to served, {what}, p50", "ms", served_ms)
    p99 = percentile(served_ms, 99)
    bench.say_value("swap", f"hand-off to served, {what}, p99", "ms", p99, len(served_ms))
    written_ms = [seconds * MS_PER_S for seconds in swaps.written_s]
    bench.say("swap", "writing the files before that", "ms", written_ms)
    _report_dip(bench, swaps, log)


def _report_dip(bench: Bench, swaps: _Swaps, log: CompletionLog) -> None:
    """Tokens count when their request ends; requests are short, and as many end as begin."""
    at_once = bench.workload.short_load.concurrency
    half_s = bench.workload.between_swaps_s / 2
    before = swaps.around(half_s, 0.0)
    steady = log.rate(before)
    bench.say(
        "swap", f"steady decoding, {at_once} at once", "tokens/s", [log.rate([w]) for w in before]
    )
    if steady <= 0:
        return
    after = [log.rate([window]) / steady for window in swaps.around(0.0, half_s)]
    name = f"decoding in the {half_s:g} s from a hand-off on, over steady"
    bench.say("swap", name, "", after)
    during = log.rate(swaps.exactly()) / steady
    name = "decoding from hand-off until served, all swaps together, over steady"
    bench.say_value("swap", name, "", during, len(swaps.served_s))
