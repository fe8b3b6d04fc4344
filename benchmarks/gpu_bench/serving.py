"""Decoding beside bare vLLM, and publications in each mode, on one GPU."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import closing

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
    free_memory,
    optimizer_beside_server,
    random_batch,
    settings_of,
    trainee_of,
)
from benchmarks.servers import (
    RANK,
    Server,
    client,
    completions,
    load_adapter,
    seconds_of,
    under_load,
    write_random_adapter,
)
from grpo_core.errors import GrpoError
from grpo_core.tree.trainer import ForwardOptions
from grpo_core.tree.weights import served_weights_directory
from grpo_trainer.weight_sync.build import build_weight_sync

GOALS = {ServerName.SHARED: 0.97, ServerName.PLAIN: 0.97, ServerName.LORA: 0.9}
"""Tokens per second over those of bare vLLM, which serves the model without an adapter."""
VLLM_SLEEP_MS = 20.0
"""`await asyncio.sleep(0.02)` at the end of vLLM's AsyncLLM.pause_generation (0.24 to 0.32)."""
PUBLICATION_GOAL_MS = 10.0
"""Of the 7B model, beyond vLLM's sleep."""
MIN_PUBLICATIONS, WARM_UPS = 3, 1
MODES = {
    ServerName.SHARED: "shared_vllm",
    ServerName.LORA: "lora_only",
    ServerName.PLAIN: "none",
}
"""Whose publications are measured."""

Speeds = dict[tuple[ServerName, int], list[float]]
"""Tokens per second by server and concurrency, round by round."""


class NothingPublished(GrpoError):
    """The publications of every mode failed."""


class UpdateNotServed(GrpoError):
    """The served weights are not those of the trainer, so that a time would be meaningless."""


def measure_decode(bench: GpuBench, until: Deadline) -> None:
    names = list(ServerName)
    servers = dict(zip(names, bench.serve(*names), strict=True))
    adapters = served_weights_directory(bench.files_of(ServerName.LORA))
    adapter = write_random_adapter(bench.model, adapters / "random")
    load_adapter(servers[ServerName.LORA].url, adapter)
    speeds: Speeds = defaultdict(list)
    work = bench.work
    for number in range(work.rounds + 1):
        for concurrency in work.concurrencies:
            # Another server is the first one in each round.
            for name in (*names[number % len(names) :], *names[: number % len(names)]):
                speed = asyncio.run(_speed(bench, servers[name], concurrency))
                if number:  # the first round warms everything up
                    speeds[name, concurrency].append(speed)
        if number:
            _say_speeds(bench, speeds)
        if number >= work.min_rounds and not until.left_s:
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


def measure_publications(bench: GpuBench, until: Deadline) -> None:
    """In each mode but `lora_restart`, after each step of a trainer, while requests run."""
    bench.stop_servers(keep=list(MODES))
    bench.launch(*MODES)
    for number, name in enumerate(MODES):
        try:
            _publish(bench, name, until.share(len(MODES) - number))
        except (GrpoError, RuntimeError, OSError) as error:
            bench.leave_out(f"publication, {name}", f"{type(error).__name__}: {error}")
        free_memory()
    if not bench.rows:
        raise NothingPublished("no mode published, see above")


def _publish(bench: GpuBench, name: ServerName, until: Deadline) -> None:
    [server] = bench.serve(name)
    mode, at_once = MODES[name], bench.work.concurrencies[1]
    batch = random_batch(bench.shape, bench.work, seed=0)
    given: dict[str, object] = {"model": str(bench.model), "inference_url": server.url}
    given |= {"mode": mode, "steps": bench.work.publications + WARM_UPS}
    if name is ServerName.SHARED:
        given |= optimizer_beside_server(bench.size)
    else:
        given |= {"save_path": bench.files_of(name), "redis_url": bench.redis_url}
    given |= {"lora_r": RANK} if name is ServerName.LORA else {}
    settings = settings_of(given, batch)
    found: list[float] = []
    with closing(build_weight_sync(settings)) as sync:
        policy = sync.load_policy().eval()
        trainee = trainee_of(policy, settings, ForwardOptions(compile=False), batch)
        sync.start(trainee.optimizer, 0)
        load = (SERVED_NAME, at_once, bench.work.prompt_tokens, bench.work.new_tokens)
        with under_load(server.url, *load):
            for step in range(WARM_UPS + bench.work.publications):
                if step >= WARM_UPS + MIN_PUBLICATIONS and not until.left_s:
                    break
                trainee.gather(step)
                trainee.optimizer.step(step)
                synchronize(bench.device)  # a publication would wait for the rest of the step
                found.append(sync.publish(trainee.optimizer, step + 1).seconds * MS_PER_S)
        if unwritten := trainee.optimizer.unwritten_parameters():
            raise UpdateNotServed(f"{unwritten} parameters differ from their masters")
    what = f"publication, {mode}, {at_once} requests under way"
    bench.say(what, "ms", found[WARM_UPS:])
    if name is ServerName.SHARED:
        beyond = [value - VLLM_SLEEP_MS for value in found[WARM_UPS:]]
        goal = Goal(PUBLICATION_GOAL_MS, is_highest=True) if bench.size == "7b" else None
        bench.say(f"{what}, beyond vLLM's sleep of {VLLM_SLEEP_MS:g} ms", "ms", beyond, goal=goal)
