"""Decoding beside bare vLLM, swaps of adapters, and publications in `shared_vllm`, on one GPU."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.gpu_bench.bench import (
    BANDWIDTH_H200,
    MS_PER_S,
    SERVED_NAME,
    Deadline,
    Goal,
    GpuBench,
    Limit,
    ServerName,
    synchronize,
)
from benchmarks.gpu_bench.models import decode_limit
from benchmarks.gpu_bench.training import (
    Trainee,
    Variant,
    optimizer_beside_server,
    optimizer_name,
    random_batch,
    trainee_of,
)
from benchmarks.servers import (
    Server,
    client,
    completions,
    load_adapter,
    seconds_of,
    under_load,
    write_random_adapter,
)
from grpo_core.clients.inference import BridgeClient
from grpo_core.errors import GrpoError
from grpo_core.tree.trainer import ForwardOptions
from grpo_trainer.weight_sync.attachment import ServerConnection
from grpo_trainer.weight_sync.shared import SharedVllm

GOALS = {ServerName.SHARED: 0.97, ServerName.PLAIN: 0.97, ServerName.LORA: 0.9}
"""Tokens per second over those of bare vLLM, which serves the model without an adapter."""
VLLM_SLEEP_MS = 20.0
"""`await asyncio.sleep(0.02)` at the end of vLLM's AsyncLLM.pause_generation (0.24 to 0.32)."""
PUBLICATION_GOAL_MS = 10.0
"""Of the 7B model, beyond vLLM's sleep."""
MIN_PUBLICATIONS, WARM_UPS = 5, 2
MIN_SWAPS = 3
PAUSE_S = 0.5
LEASE_S = 60.0

Speeds = dict[tuple[ServerName, int], list[float]]
"""Tokens per second by server and concurrency, round by round."""


class UpdateNotServed(GrpoError):
    """The served weights are not those of the trainer, so that a time would be meaningless."""


def measure_decode(bench: GpuBench, until: Deadline) -> None:
    names = list(ServerName)
    servers = dict(zip(names, bench.serve(*names), strict=True))
    load_adapter(servers[ServerName.LORA].url, _adapter(bench, 0))
    speeds: Speeds = defaultdict(list)
    work = bench.work
    for number in range(work.rounds + 1):
        for concurrency in work.concurrencies:
            # Another server is the first one in each round.
            for name in (*names[number % len(names) :], *names[: number % len(names)]):
                speed = asyncio.run(_speed(bench, servers[name], concurrency))
                if number:  # the first round warms everything up
                    speeds[name, concurrency].append(speed)
        # A run that is cut off later has printed figures.
        is_last = number >= work.min_rounds and not until.left_s
        if number in (work.min_rounds, work.rounds) or is_last:
            _say_speeds(bench, speeds)
        if is_last:
            break


async def _speed(bench: GpuBench, server: Server, concurrency: int) -> float:
    """Tokens per second of requests that are sent at once, prefill included."""
    body = {"model": SERVED_NAME, "max_tokens": bench.work.new_tokens}
    async with client() as session:
        send = completions(session, server.url, bench.work.prompt_tokens, body)
        seconds = await seconds_of(send, concurrency, concurrency)
    return concurrency * bench.work.new_tokens / seconds


def _say_speeds(bench: GpuBench, speeds: Speeds) -> None:
    work, number_bytes = bench.work, bench.dtype.itemsize
    context = work.prompt_tokens + work.new_tokens / 2  # mean over the steps of decoding
    names = list(ServerName)
    for (name, concurrency), found in sorted(
        speeds.items(), key=lambda item: (item[0][1], names.index(item[0][0]))
    ):
        measured, datasheet = (
            decode_limit(bench.shape, concurrency, context, number_bytes, bandwidth)
            for bandwidth in (bench.rates.bandwidth, BANDWIDTH_H200)
        )
        reason = "memory bandwidth as measured"
        reason += f"; {datasheet:,.0f} by an H200's datasheet" if bench.on_gpu else ""
        bench.say(f"{name}, {concurrency} at once", "tokens/s", found, Limit(measured, reason))
        if name is not ServerName.BARE:
            pairs = zip(found, speeds[ServerName.BARE, concurrency], strict=True)
            ratios, label = [ours / bare for ours, bare in pairs], f"{name} over bare vLLM"
            bench.say(f"{label}, {concurrency} at once", "", ratios, goal=Goal(GOALS[name]))


def measure_swaps(bench: GpuBench, until: Deadline) -> None:
    [server] = bench.serve(ServerName.LORA)
    at_once = bench.work.concurrencies[1]
    written_ms, served_ms = [], []
    with under_load(server.url, SERVED_NAME, at_once, bench.work.prompt_tokens, 32):
        load_adapter(server.url, _adapter(bench, 0))  # warms up
        for number in range(1, bench.work.swaps + 1):
            if number > MIN_SWAPS and not until.left_s:
                break
            time.sleep(PAUSE_S)
            began = time.monotonic()
            written = _adapter(bench, number)
            handed_off = time.monotonic()
            load_adapter(server.url, written)
            served_ms.append((time.monotonic() - handed_off) * MS_PER_S)
            written_ms.append((handed_off - began) * MS_PER_S)
    what = f"rank 16 on q_proj and v_proj, {at_once} generations under way"
    bench.say(f"hand-off to served, {what}", "ms", served_ms)
    bench.say("writing the files before that", "ms", written_ms)


def _adapter(bench: GpuBench, seed: int) -> Path:
    directory = bench.directory / "adapters" / f"{time.monotonic_ns()}"
    return write_random_adapter(bench.model, directory, seed)


def measure_publications(bench: GpuBench, until: Deadline) -> None:
    bench.stop_servers(keep=[ServerName.SHARED])
    [server] = bench.serve(ServerName.SHARED)
    variant = Variant("default", ForwardOptions(), optimizer_beside_server(bench.size))
    batch = random_batch(bench.shape, bench.work, seed=0)
    at_once, work = bench.work.concurrencies[1], bench.work
    steps = count()
    with attached(server, str(bench.model)) as (sync, policy):
        trainee = trainee_of(policy, variant, batch)
        sync.start(trainee.optimizer, 0)
        idle_ms = _published_ms(bench, sync, trainee, steps, until.share(2))
        with under_load(server.url, SERVED_NAME, at_once, work.prompt_tokens, work.new_tokens):
            loaded_ms = _published_ms(bench, sync, trainee, steps, until)
        if unwritten := trainee.optimizer.unwritten_parameters():
            raise UpdateNotServed(f"{unwritten} parameters differ from their masters")
    name = f"publication, {optimizer_name(variant.optimizer)}"
    goal = Goal(PUBLICATION_GOAL_MS, is_highest=True) if bench.size == "7b" else None
    for where, found in (("idle", idle_ms), (f"{at_once} generations under way", loaded_ms)):
        bench.say(f"{name}, {where}", "ms", found)
        beyond = [value - VLLM_SLEEP_MS for value in found]
        sleep = f"beyond vLLM's sleep of {VLLM_SLEEP_MS:g} ms"
        bench.say(f"the same {sleep}, {where}", "ms", beyond, goal=goal)


def _published_ms(
    bench: GpuBench, sync: SharedVllm, trainee: Trainee, steps: Iterator[int], until: Deadline
) -> list[float]:
    """Milliseconds of each publication, each after a training step."""
    found: list[float] = []
    while len(found) < WARM_UPS + bench.work.publications:
        if len(found) >= WARM_UPS + MIN_PUBLICATIONS and not until.left_s:
            break
        step = next(steps)
        trainee.gather(step)
        trainee.optimizer.step(step)
        synchronize(bench.device)  # a publication would wait for the rest of the step
        found.append(sync.publish(trainee.optimizer, step + 1).seconds * MS_PER_S)
    return found[WARM_UPS:]


@contextmanager
def attached(server: Server, model: str) -> Iterator[tuple[SharedVllm, Any]]:
    """The weight sync, and the policy of views of the server's weights."""
    sync = SharedVllm(ServerConnection(BridgeClient(server.url)), model, lease_s=LEASE_S)
    try:
        yield sync, sync.load_policy().eval()
    finally:
        sync.close()
