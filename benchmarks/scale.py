"""Predicts training on 8, 64 and 512 GPUs, none of which was there:

    python -m benchmarks.scale

The memory of a rank is `memory_plan`'s, and a GPU's time `gpu_trace`'s. A test counts the bytes of
FSDP2. The rest follows from the rates below, and from seconds of the host that other benchmarks
measured on a CPU. Takes five minutes.
"""

from __future__ import annotations

import argparse
import gzip
import math
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from heapq import heappop, heappush
from itertools import cycle, islice, product
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_bench.models import SHAPES, ShapeName, decode_limit, random_policy, work_on
from benchmarks.gpu_bench.training import random_batch
from benchmarks.gpu_trace import BYTES_PER_S, GRADIENTS, META, REACHED, Step, own_tokens, traced
from benchmarks.report import number, publish, table
from benchmarks.run_api_bench.load import scored_group
from grpo_core.tree.trainer_command import CommandLine
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.memory_plan import MICRO_BATCHES, collected_bytes, kept_bytes, working_bytes
from grpo_trainer.model.adapter import with_adapter
from grpo_trainer.model.policy import layers_of

MODELS: tuple[ShapeName, ...] = ("1.5b", "7b", "32b")
GPUS, CONTEXTS, GROUP, AHEAD = (8, 64, 512), (4096, 16_384), 8, 8
"""AHEAD: batches that are queued or sampled, `--max-batches-offpolicy`."""
SEQUENCES = 8
"""Of a batch, for each GPU."""
CARDS = (80e9, 141e9)
USABLE = 0.95
"""Of a card, beside the CUDA context, NCCL and gaps: assumed."""
NODE, NVLINK, NIC = 8, 0.8 * 450e9, 0.8 * 50e9
"""GPUs of a node; bytes/s in it, and of an adapter of 400 Gb/s: 0.8 of the datasheets, assumed."""
HOP_S, FAR_HOP_S = 3.4e-6, 14e-6
"""Of a ring in a node, and between nodes: the constants by which NCCL chooses its algorithms."""
PCIE, DISK, HTTP, GLOO = 25e9, 2e9, 1.25e9, 1.1e9
"""Bytes/s: to the host, of a node's disk, of a download (assumed); of gloo (measured, loopback)."""
DIGEST, DELTA, APPLY, MEMORY, DELTA_SHARE = 1.6e9, 0.72e9, 0.94e9, 2.5e9, 0.031
"""Bytes/s of one core: to hash a version, compute its delta, apply it, and write to /dev/shm; and a
delta's share if 2 % of the weights changed. All measured."""
DECODED, SLOTS = 0.5, 256
"""Share of memory's rate that decoding reaches, and most sequences of a server: assumed."""
INTAKE_S, FETCH_S = 2.09e-3 / 8192, 20.8e-3 / 65_536
"""Of a core per token, run-api with Redis: to accept groups, to hand out a batch (`run_api`)."""
LEADER_S, EXPOSED_S = (25.9e-3 + 126e-3) / 131_072 + 0.34e-6, 9.5e-3 / 131_072
"""Of a core per token, rank 0: all its work, and what is not beside the GPU's (`host_step`)."""
SENT, RETURNED = 24, 12
"""Bytes per token: of a micro-batch from rank 0, and of the values that ranks return."""
ADAMW, ADAMW_8BIT = "adamw", "adamw_8bit"
WIRE = ("tokens", "masks", "scores", "inference_logprobs")
GB = 1e9


def gathered_bytes(parameters: Iterable[Tensor], ranks: int, itemsize: int) -> int:
    """Of an all-gather or reduce-scatter of FSDP2, which divides rows and pads the last part."""
    return itemsize * sum(-(-len(p) // ranks) * ranks * (p.numel() // len(p)) for p in parameters)


def link_s(size: float, ranks: int, adapters: int) -> float:
    """An all-gather or reduce-scatter over a ring. Args: adapters: of a node, to others"""
    nodes = -(-ranks // NODE)
    rate = NVLINK if nodes == 1 else min(NVLINK, adapters * NIC)
    return size * (ranks - 1) / ranks / rate + (ranks - nodes) * HOP_S + (nodes - 1) * FAR_HOP_S


@cache
def groups_of(context: int, count: int) -> list[tuple[int, list[int]]]:
    """Lengths of the prompt and of the completions of so many groups, with a heavy tail."""
    draw, prompt = random.Random(f"{context}/{count}"), context // 8

    def completion() -> int:
        return min(context - prompt, 1 + int(draw.lognormvariate(math.log(context / 8), 1)))

    return [(prompt, [completion() for _ in range(GROUP)]) for _ in range(count)]


@cache
def policy_of(model: ShapeName) -> tuple[Any, int, int]:
    """Without memory, and the numbers of weights: of a layer, and outside of layers."""
    policy = random_policy(model, torch.bfloat16, META)
    layers = layers_of(policy)
    assert layers is not None
    layer = sum(p.numel() for p in layers[0].parameters())
    return policy, layer, sum(p.numel() for p in policy.parameters()) - len(layers) * layer


@cache
def speed_of(model: ShapeName, context: int) -> tuple[float, float, float]:
    """Seconds of a GPU: of a token in both passes, of the gradients of all weights after each
    micro-batch, and of the update of all weights."""
    work = replace(work_on(model, on_gpu=True), sequences=4, shortest=context // 8)
    budget = max(1, 16_384 // context)
    batch = random_batch(SHAPES[model], replace(work, longest=context, micro_batch=budget), seed=0)
    phases = traced(Step(model), batch)
    kinds, passes = phases[GRADIENTS].kinds, batch.micro_batches
    names = ("add_", "cat", "_to_copy", "zeros_like", "linalg_vector_norm")
    gather_s = sum(kinds[name].seconds for name in names if name in kinds) / REACHED
    rest_s = phases[GRADIENTS].seconds_at(REACHED) - gather_s
    update_s = sum(one.seconds_at(REACHED) for name, one in phases.items() if name != GRADIENTS)
    return rest_s / sum(map(own_tokens, passes)), gather_s / len(passes), update_s


@cache
def memory_of(
    model: ShapeName,
    parts: int,
    tokens: int,
    recomputes: bool,
    optimizer: str,
    adapter: bool = False,
) -> tuple[float, float, float]:
    """Bytes of a rank: kept, collected by FSDP2, and for a short time. Args: parts: ranks that
    divide the state; 1: each holds all"""
    given = {"model": "random", "mode": "lora_only" if adapter else "none", "optimizer": optimizer}
    settings = CommandLine.model_validate(given | {"tokens_per_micro_batch": tokens}).settings()
    policy, _, _ = policy_of(model)
    if settings.lora:
        policy = with_adapter(random_policy(model, torch.bfloat16, META), settings.lora)
    kept = kept_bytes(settings, policy, settings.optimizer_on("cuda")).total / parts
    collected = collected_bytes(policy) if parts > 1 else 0
    working = working_bytes(settings, policy, is_gpu=True)[recomputes]
    return kept, collected, working


@dataclass(frozen=True)
class Case:
    """Args: card: bytes of a GPU; tokens: of a micro-batch"""

    model: ShapeName
    context: int
    gpus: int
    ranks: int
    card: float
    optimizer: str
    tokens: int
    recomputes: bool

    @property
    def name(self) -> str:
        return f"{self.model}, {self.context:,}, {self.gpus}"

    @property
    def width(self) -> int:
        """GPUs of a server."""
        return 1 + (self.model == "32b")

    @property
    def servers(self) -> int:
        return (self.gpus - self.ranks) // self.width

    @property
    def groups(self) -> list[tuple[int, list[int]]]:
        return groups_of(self.context, self.gpus * SEQUENCES // GROUP)

    @property
    def all_tokens(self) -> int:
        return sum(GROUP * prompt + sum(rows) for prompt, rows in self.groups)

    @property
    def bytes(self) -> float:
        return sum(memory_of(self.model, self.ranks, self.tokens, self.recomputes, self.optimizer))

    def trained_s(self, adapters: int = NODE) -> tuple[float, float, float]:
        """Of computation, of exchanges, and of those that it does not hide."""
        (token_s, gather_s, update_s), ranks = speed_of(self.model, self.context), self.ranks
        tokens = sum(prompt + sum(rows) for prompt, rows in self.groups)  # a prompt counts once
        passes = max(1, -(-tokens // (ranks * self.tokens)))
        one = tokens / ranks / passes * token_s
        forward, backward = one / 3, one * (1 if self.recomputes else 2 / 3)
        gather, reduce, ends = links_s(self.model, ranks, adapters)
        _, layer, root = policy_of(self.model)
        copies = 14 * (layer * SHAPES[self.model].layers + root) / (BYTES_PER_S * REACHED)
        computed = passes * (forward + backward + copies + gather_s / ranks) + update_s / ranks
        hidden = min(forward, gather) + min(backward, gather + reduce)
        both = ends + 2 * gather + reduce
        return computed, passes * both, passes * (both - hidden)

    def host_s(self) -> tuple[float, float]:
        """Of rank 0: of its interpreter, and those in which GPUs wait."""
        padded = sum(GROUP * (prompt + max(rows)) for prompt, rows in self.groups)
        hops = math.ceil(math.log2(self.ranks))
        sent_s = padded * (SENT * hops + 2 * RETURNED) / GLOO
        return self.all_tokens * LEADER_S, self.all_tokens * EXPOSED_S + sent_s

    def step_s(self, ahead: int = AHEAD, steps: int = 20) -> tuple[float, float]:
        """Of a step, and of its wait for a batch: simulated, as groups end with their longest
        completion. Args: ahead: batches that are queued or sampled"""
        computed, _, exposed = self.trained_s()
        works_s = max(computed + exposed + self.host_s()[1], self.host_s()[0])
        draw, shape, batch = cycle(self.groups), SHAPES[self.model], len(self.groups)
        mean_tokens = self.all_tokens / batch / GROUP
        busy = mean(mean(rows) / max(rows) for _, rows in self.groups)
        room = self.card * 0.9 * self.width - 2 * shape.matmul_parameters
        most = min(SLOTS, room / mean_tokens / shape.kv_bytes_per_token(2)) * self.servers
        sampled = int(min(ahead * batch, most / busy / GROUP))
        each = max(1, round(sampled * busy * GROUP / self.servers))
        rate = DECODED * decode_limit(shape, each, mean_tokens, 2, BYTES_PER_S * self.width)
        running, queued, now, since, waited_s = list[float](), 0, 0.0, 0.0, 0.0

        def start(at: float) -> None:
            while len(running) < sampled and len(running) + queued < ahead * batch:
                heappush(running, at + max(next(draw)[1]) * each / rate)

        start(now)
        for step in range(2 * steps):
            ready, since = now, now if step == steps else since
            while queued < batch or (running and running[0] <= now):
                now, queued, done = max(now, running[0]), queued + 1, heappop(running)
                start(done)
            waited_s += (now - ready) * (step >= steps)
            queued -= batch
            start(now)
            now += works_s
        return (now - since) / steps, waited_s / steps


def links_s(model: ShapeName, ranks: int, adapters: int) -> tuple[float, float, float]:
    """Of a micro-batch: to collect all layers once, to add up their gradients, and both for what is
    outside of layers: its weights come before all, and its gradients leave after all."""
    _, layer, root = policy_of(model)
    sizes = (2 * layer, 4 * layer, 2 * root, 4 * root)
    gather, reduce, first, last = (link_s(size, ranks, adapters) for size in sizes)
    return SHAPES[model].layers * gather, SHAPES[model].layers * reduce, first + last


def best_case(model: ShapeName, context: int, gpus: int) -> Case:
    """The split with the shortest step, on the smallest card on which a rank fits."""
    micro_batches = [
        (tokens, again) for again in (False, True) for tokens in MICRO_BATCHES if tokens >= context
    ]
    for card, optimizer in product(CARDS, (ADAMW, ADAMW_8BIT)):
        fitting = list[Case]()
        for ranks in (gpus // 4, gpus // 2, gpus * 3 // 4):
            ways = (Case(model, context, gpus, ranks, card, optimizer, *m) for m in micro_batches)
            fitting += islice((case for case in ways if case.bytes <= USABLE * card), 1)
        if fitting:
            return min(fitting, key=Case.step_s)
    raise SystemExit(f"{model} does not fit on {gpus} GPUs")


def memory_rows() -> Iterator[list[str]]:
    yield ["GB of a rank", "kept", "collected", "short", "sum", *(f"{c / GB:g}" for c in CARDS)]
    whole = [*product((False,), (1, 6, 32, 256)), (True, 1), (True, 32)]
    for model, (adapter, parts) in product(MODELS, whole):
        name = f"{model}{', adapter' * adapter}, {f'FSDP2, {parts}' if parts > 1 else 'whole'}"
        kinds = memory_of(model, parts, MICRO_BATCHES[1], True, ADAMW_8BIT, adapter)
        fits = ("fits" if sum(kinds) <= USABLE * card else "no" for card in CARDS)
        yield [name, *(number(kind / GB) for kind in (*kinds, sum(kinds))), *fits]


def split_rows(cases: Sequence[Case]) -> Iterator[list[str]]:
    fields = scored_group(random.Random(0), 128, 896)
    group = ScoredGroup.model_validate({name: fields[name] for name in WIRE})
    sent = gzip.compress(group.model_dump_json().encode(), compresslevel=1)
    each = len(sent) / sum(map(len, group.tokens))
    parts = ("GB of a rank, card", "micro-batch", "tokens", f"MB, {each:.1f} bytes a token")
    yield ["model, context, GPUs", "ranks + servers", *parts, "run-api's core, s"]
    for case in cases:
        yield [
            case.name,
            f"{case.ranks} + {case.servers}{' of 2 GPUs' * (case.width > 1)}",
            f"{number(case.bytes / GB)} of {case.card / GB:g}",
            f"{case.tokens:,}{', recomputed' * case.recomputes}",
            f"{case.all_tokens:,}",
            number(case.all_tokens * each / 1e6),
            number(case.all_tokens * (INTAKE_S + FETCH_S)),
        ]


def step_rows(cases: Sequence[Case]) -> Iterator[list[str]]:
    parts = ("computes", "links", "not hidden", "with one adapter", "host", "waits for a batch")
    yield ["model, context, GPUs", *(f"{part}, s" for part in (*parts, "rank 0's core", "step"))]
    for case in cases:
        busy_s, waiting_s = case.host_s()
        step_s, waited_s = case.step_s()
        links = (*case.trained_s(), case.trained_s(adapters=1)[2])
        yield [case.name, *map(number, (*links, waiting_s, waited_s, busy_s, step_s))]


def state_rows(cases: Sequence[Case]) -> Iterator[list[str]]:
    files = ("files: rank 0", "files: servers", "delta: rank 0", "delta: servers")
    parts = ("checkpoint: to the host", "to disks", *files, "collective", "its link alone")
    yield ["model, GPUs", "state, GB", "weights, GB", *(f"{part}, s" for part in parts)]
    for case in cases:
        weights = sum(p.numel() for p in policy_of(case.model)[0].parameters())
        state, size = weights * (12 if case.optimizer == ADAMW else 6.03), 2 * weights
        rounds = math.ceil(math.log2(case.servers + 1))  # each server serves the next ones
        collected_s, one = link_s(size, case.ranks, NODE), size * DELTA_SHARE
        written_s = collected_s + size * (1 / PCIE + 1 / DISK + 1 / DIGEST)
        loaded_s, checked_s = size / case.width / PCIE, size / DIGEST
        kept_s = size / case.width * (1 / DIGEST + 1 / MEMORY)  # a thread of each worker
        times_s = (
            *(state / case.ranks / PCIE, state / -(-case.ranks // NODE) / DISK),
            *(written_s, rounds * (size / HTTP + checked_s) + loaded_s),
            *(written_s + size / DELTA, rounds * one / HTTP + size / APPLY + checked_s + loaded_s),
            *(collected_s + size * (1 / NIC + 1 / PCIE) + kept_s + loaded_s, size / NIC),
        )
        name = f"{case.model}, {case.gpus}"
        yield [name, *map(number, (state / GB, size / GB, *times_s))]


def limit_rows() -> Iterator[list[str]]:
    fabrics = [(ranks, adapters) for ranks in (32, 256) for adapters in (NODE, 1)]
    yield [
        *("model", "tokens/s of a rank", "of a server", "ranks of one rank 0"),
        *("servers of one run-api", "longest sequence, 80 GB", "sums of whole ranks, s"),
        *(f"hidden from tokens on, {n} ranks, {a} adapters" for n, a in fabrics),
    ]
    for model in MODELS:
        shape, (policy, _, _) = SHAPES[model], policy_of(model)
        rate = 1 / speed_of(model, CONTEXTS[0])[0]
        bandwidth = BYTES_PER_S * (1 + (model == "32b")) * DECODED
        decoded = decode_limit(shape, SLOTS, 1024, 2, bandwidth)
        sizes = (2**power for power in range(20, 11, -1))
        longest = next(
            n for n in sizes if sum(memory_of(model, 32, n, True, ADAMW_8BIT)) <= USABLE * CARDS[0]
        )
        weights = sum(p.numel() for p in policy.parameters())
        hidden = [
            rate * (2 * gather + reduce + ends)
            for gather, reduce, ends in (links_s(model, *fabric) for fabric in fabrics)
        ]
        counts = (rate, decoded, 1 / LEADER_S / rate, 1 / INTAKE_S / decoded, longest)
        sums_s = 2 * link_s(4 * weights, 16, 1)
        yield [
            model,
            *(f"{n:,.0f}" for n in counts),
            number(sums_s),
            *(f"{n:,.0f}" for n in hidden),
        ]


def wait_rows(case: Case) -> Iterator[list[str]]:
    yield [f"{case.name}: batches ahead", "step, s", "of which it waits"]
    for ahead in (1, 3, 8, 16, 32):
        step_s, waited_s = case.step_s(ahead)
        yield [str(ahead), number(step_s), f"{waited_s / step_s:.0%}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, help="file in which to replace the section")
    given = parser.parse_args()
    cases = [best_case(*one) for one in product(MODELS, CONTEXTS, GPUS)]
    short = [case for case in cases if case.context == CONTEXTS[0]]
    one = next(case for case in short if (case.model, case.gpus) == ("7b", 64))
    parts = (
        *(memory_rows(), split_rows(cases), step_rows(cases), state_rows(short)),
        *(limit_rows(), wait_rows(one)),
    )
    lines = [line for rows in parts for line in (*table([*rows]), "")]
    publish("several nodes, on paper", lines, given.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
