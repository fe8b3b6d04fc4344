"""Decoding beside bare vLLM, and what a new adapter costs it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from benchmarks.gpu_bench.bench import MS_PER_S, GpuBench, at_least
from benchmarks.gpu_bench.report import Limit
from benchmarks.gpu_bench.servers import (
    LORA_RANK,
    SERVED_NAME,
    TARGETS,
    GpuServer,
    ServerName,
    load_adapter,
    write_random_adapter,
)
from benchmarks.gpu_bench.settings import (
    BANDWIDTH_H200,
    GpuDeadline,
    LoadWork,
    decode_limit,
    mean_context,
    percentile,
)
from grpo_core.errors import GrpoError

PATH = "/v1/completions"
ANSWER_DEADLINE_S = 120.0
_PROMPT_VOCABULARY = 256
"""Prompts are of bytes, which every tokenizer of the benchmark knows."""
_SHOWN_BYTES = 300


class NoCompletion(GrpoError):
    """A server did not answer a request as it was asked, so that a number would say nothing."""


@dataclass(frozen=True)
class CompletionRequest:
    """`prompt`: token ids. Exactly `new_tokens` are sampled."""

    prompt: list[int]
    new_tokens: int

    def encoded(self, host: str) -> bytes:
        body = json.dumps(
            {
                "model": SERVED_NAME,
                "prompt": self.prompt,
                "max_tokens": self.new_tokens,
                "ignore_eos": True,
            }
        ).encode()
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


def random_request(
    generator: random.Random, prompt_tokens: int, new_tokens: int
) -> CompletionRequest:
    """A prompt of its own, so that no cache of prompts knows its beginning."""
    prompt = generator.choices(range(_PROMPT_VOCABULARY), k=prompt_tokens)
    return CompletionRequest(prompt, new_tokens)


class GpuConnection:
    """One, kept alive. `async with Connection(url)`."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._place = parts.hostname, parts.port
        self._host = parts.netloc

    async def __aenter__(self) -> Self:
        try:
            self._reader, self._writer = await asyncio.open_connection(*self._place)
        except OSError as error:
            raise NoCompletion(f"{self._host}: {error}") from error
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._writer.close()

    async def complete(self, request: CompletionRequest) -> int:
        """Returns how many tokens were sampled.

        Raises:
            NoCompletion: an error, no answer within 120 s, or another number than was asked for.
        """
        try:
            async with asyncio.timeout(ANSWER_DEADLINE_S):
                self._writer.write(request.encoded(self._host))
                status, body = await self._answer()
        except (OSError, EOFError, TimeoutError) as error:
            raise NoCompletion(f"{self._host}{PATH}: {error!r}") from error
        if status != 200:
            raise NoCompletion(f"{self._host}{PATH}: {status}, {body[:_SHOWN_BYTES]!r}")
        sampled: int = json.loads(body)["usage"]["completion_tokens"]
        if sampled != request.new_tokens:
            raise NoCompletion(f"{sampled} tokens were sampled instead of {request.new_tokens}")
        return sampled

    async def _answer(self) -> tuple[int, bytes]:
        """Status and body, whose length the answer must name."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status_line, *lines = head.split("\r\n")
        headers = {
            name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)
        }
        body = await self._reader.readexactly(int(headers["content-length"]))
        return int(status_line.split()[1]), body


class CompletionLog:
    """Times are those of one clock, in seconds; they come in order."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, int]] = []

    def add(self, time_s: float, tokens: int) -> None:
        self._ends.append((time_s, tokens))

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in list(self._ends))

    @property
    def last_s(self) -> float:
        """Needs one request at least."""
        return self._ends[-1][0]

    def rate(self, windows: Sequence[tuple[float, float]]) -> float:
        """Tokens per second in all of the windows together: those of requests that ended there."""
        ends = list(self._ends)
        tokens = sum(n for begin, end in windows for at, n in ends if begin <= at < end)
        return tokens / sum(end - begin for begin, end in windows)


_numbers = count()
"""Of loads: each draws other prompts than those before it."""
STOP_DEADLINE_S = 60.0


def decode(url: str, concurrency: int, prompt_tokens: int, new_tokens: int) -> float:
    """Tokens per second of `concurrency` requests that are sent at once, prefill included.

    Raises:
        NoCompletion: one of them was not answered as it was asked.
    """
    return asyncio.run(_decode(url, concurrency, prompt_tokens, new_tokens))


async def _decode(url: str, concurrency: int, prompt_tokens: int, new_tokens: int) -> float:
    generator = random.Random(next(_numbers))
    requests = [random_request(generator, prompt_tokens, new_tokens) for _ in range(concurrency)]
    async with contextlib.AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(GpuConnection(url)) for _ in requests]
        began = time.perf_counter()
        pairs = zip(connections, requests, strict=True)
        await asyncio.gather(*(connection.complete(request) for connection, request in pairs))
        return concurrency * new_tokens / (time.perf_counter() - began)


class BackgroundLoad:
    """Generations in a thread of their own.

    Args:
        requests: ends after so many; None: when told to
    """

    def __init__(self, url: str, work: LoadWork, requests: int | None = None) -> None:
        self.log = CompletionLog()
        self._url = url
        self._work = work
        self._left = None if requests is None else iter(range(requests))
        self._random = random.Random(next(_numbers))
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Requests under way are waited for."""
        self._stopping.set()
        self._thread.join(STOP_DEADLINE_S)

    @property
    def is_over(self) -> bool:
        """All requests were answered, or one was not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Until all requests were answered. Raises what went wrong."""
        self._thread.join()
        self.check()

    def check(self) -> None:
        """Raises what went wrong in the thread, if anything did."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            asyncio.run(self._all())
        except ExceptionGroup as errors:
            self._error = errors.exceptions[0]

    async def _all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self._work.concurrency):
                group.create_task(self._one_after_the_other())

    async def _one_after_the_other(self) -> None:
        work = self._work
        async with GpuConnection(self._url) as connection:
            while not self._stopping.is_set():
                if self._left is not None and next(self._left, None) is None:
                    return
                new_tokens = self._random.randint(*work.new_tokens)
                request = random_request(self._random, work.prompt_tokens, new_tokens)
                sampled = await connection.complete(request)
                self.log.add(time.monotonic(), sampled)


@contextlib.contextmanager
def background_load(
    url: str, work: LoadWork, requests: int | None = None
) -> Iterator[BackgroundLoad]:
    """Goes on inside the context. Raises at its end what went wrong in it."""
    load = BackgroundLoad(url, work, requests)
    load.start()
    try:
        yield load
    finally:
        load.stop()
    load.check()


GOALS = {ServerName.SHARED: 0.97, ServerName.PLAIN: 0.97, ServerName.LORA: 0.9}
"""Tokens per second over those of bare vLLM, which serves the model without an adapter."""
MODES = (ServerName.PLAIN, ServerName.SHARED, ServerName.LORA)

Speeds = dict[tuple[ServerName, int], list[float]]
"""Tokens per second by server and concurrency, round by round."""


def measure_decode(bench: GpuBench, deadline: GpuDeadline) -> None:
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

    def __init__(self, bench: GpuBench, modes: Sequence[ServerName], earlier: Speeds) -> None:
        self._bench = bench
        self._modes = modes
        self._earlier = earlier
        self._speeds: Speeds = defaultdict(list)
        self._answering = bench.pool.up([ServerName.BARE, *modes])

    def measure(self, until: GpuDeadline) -> None:
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


def _rotated(servers: Sequence[GpuServer], by: int) -> Sequence[GpuServer]:
    """Nobody is always measured first."""
    first = by % max(1, len(servers))
    return [*servers[first:], *servers[:first]]


def _say_speed(bench: GpuBench, name: ServerName, concurrency: int, speeds: list[float]) -> None:
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


def measure_swaps(bench: GpuBench, deadline: GpuDeadline) -> None:
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
    _report_swaps(bench, swaps, load.log)


def _swap(bench: GpuBench, server: GpuServer, number: int, swaps: _Swaps) -> None:
    directory = bench.adapters / f"swap_{number}"
    began = time.monotonic()
    write_random_adapter(bench.shape, LORA_RANK, directory, seed=number + 1)
    handed_off = time.monotonic()
    load_adapter(server.url, directory)
    served = time.monotonic()
    swaps.written_s.append(handed_off - began)
    swaps.served_s.append(served - handed_off)
    swaps.handed_off_at.append(handed_off)


def _report_swaps(bench: GpuBench, swaps: _Swaps, log: CompletionLog) -> None:
    what = f"rank {LORA_RANK} on {' and '.join(TARGETS)}"
    served_ms = [seconds * MS_PER_S for seconds in swaps.served_s]
    bench.say("swap", f"hand-off to served, {what}, p50", "ms", served_ms)
    p99 = percentile(served_ms, 99)
    bench.say_value("swap", f"hand-off to served, {what}, p99", "ms", p99, len(served_ms))
    written_ms = [seconds * MS_PER_S for seconds in swaps.written_s]
    bench.say("swap", "writing the files before that", "ms", written_ms)
    _report_dip(bench, swaps, log)


def _report_dip(bench: GpuBench, swaps: _Swaps, log: CompletionLog) -> None:
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
