"""The trainer's own step: gradients, optimizer, write; beside the GPU's rate of matrix products."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median

import torch
from pydantic import ValidationError

from benchmarks.gpu_bench.attached import give_memory_back
from benchmarks.gpu_bench.bench import GIB, MS_PER_S, TIME_IS_UP, Bench, at_least
from benchmarks.gpu_bench.budget import Deadline
from benchmarks.gpu_bench.counts import train_flops
from benchmarks.gpu_bench.figures import Limit, number
from benchmarks.gpu_bench.random_model import random_policy
from benchmarks.gpu_bench.rates import synchronize
from benchmarks.gpu_bench.train_batch import random_batch, trained_lengths
from benchmarks.gpu_bench.train_variants import (
    Variant,
    forward_variants,
    optimizer_variants,
    usual_optimizer,
)
from benchmarks.gpu_bench.trainee import Trainee, trainee_of
from benchmarks.gpu_bench.training_memory import bytes_per_weight, step_bytes_per_weight
from grpo_core.errors import GrpoError
from grpo_trainer.data.collate import Batch

GOAL = 0.45
"""Of the measured rate of matrix products."""
WARM_UPS = 2
FITS = 0.9
"""Of the GPU's memory: what is kept from step to step must leave room for activations."""


@dataclass
class _Steps:
    """Seconds of whole steps, and of the optimizer's part; bytes at the most."""

    whole_s: list[float] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0


def measure(bench: Bench, deadline: Deadline) -> None:
    """A variant that does not fit, or lacks a package, is left out and says so."""
    bench.pool.keep(())
    usual = usual_optimizer(bench.size)
    variants = [*forward_variants(usual), *optimizer_variants(usual)]
    batch = random_batch(bench.shape, bench.workload.train, seed=0)
    best = 0.0
    for index, variant in enumerate(variants):
        obstacle = TIME_IS_UP if deadline.passed else _why_too_large(bench, variant, batch)
        if obstacle is not None:
            bench.leave_out("train", obstacle, variant.name)
            continue
        until = deadline.part_of(1 / (len(variants) - index))
        try:
            steps = _steps(bench, variant, batch, until)
        except (GrpoError, ValidationError, ImportError, RuntimeError) as error:
            bench.leave_out("train", _short(error), variant.name)
            continue
        finally:
            give_memory_back()
            torch.compiler.reset()
        best = max(best, _report(bench, variant, batch, steps))
    if best:
        name = "model FLOPs of the best over measured matrix products"
        bench.say("train", name, "", [best], goal=at_least(GOAL))


def _why_too_large(bench: Bench, variant: Variant, batch: Batch) -> str | None:
    if not bench.on_gpu:
        return None
    needed = _kept_bytes(bench, variant, batch)
    there = torch.cuda.get_device_properties(bench.device).total_memory
    if needed <= FITS * there:
        return None
    return f"what it keeps is {needed / GIB:.0f} GiB of the GPU's {there / GIB:.0f}"


def _kept_bytes(bench: Bench, variant: Variant, batch: Batch) -> float:
    kept = bytes_per_weight(variant.optimizer, len(batch.micro_batches), bench.dtype.itemsize)
    return kept.total * bench.shape.parameters


def _steps(bench: Bench, variant: Variant, batch: Batch, until: Deadline) -> _Steps:
    policy = random_policy(bench.size, bench.dtype, bench.device)
    trainee = trainee_of(policy, variant, batch)
    for step in range(WARM_UPS):
        _one(trainee, step, bench.device)
    if bench.on_gpu:
        torch.cuda.reset_peak_memory_stats(bench.device)
    work, steps = bench.workload.train, _Steps()
    for step in range(WARM_UPS, WARM_UPS + work.steps):
        if len(steps.whole_s) >= work.min_steps and until.passed:
            break
        whole_s, optimizer_s = _one(trainee, step, bench.device)
        steps.whole_s.append(whole_s)
        steps.optimizer_s.append(optimizer_s)
    if bench.on_gpu:
        steps.peak_bytes = torch.cuda.max_memory_allocated(bench.device)
    return steps


def _one(trainee: Trainee, step: int, device: torch.device) -> tuple[float, float]:
    """Seconds of the whole step, and of optimizer and write."""
    began = time.perf_counter()
    trainee.gather(step)
    synchronize(device)
    gathered = time.perf_counter()
    trainee.optimizer.step(step)
    trainee.optimizer.write_into_parameters()
    synchronize(device)
    ended = time.perf_counter()
    return ended - began, ended - gathered


def _report(bench: Bench, variant: Variant, batch: Batch, steps: _Steps) -> float:
    """Returns the share of the rate of matrix products."""
    lengths = trained_lengths(batch)
    tokens, flops = sum(lengths), train_flops(bench.shape, lengths)
    speeds = [tokens / seconds for seconds in steps.whole_s]
    at_best = Limit(
        value=tokens / flops * bench.rates.flops,
        what=f"{flops / tokens / 1e9:.3g} GFLOP a token at the measured rate",
    )
    bench.say("train", variant.name, "tokens/s", speeds, limit=at_best)
    _report_optimizer(bench, variant, batch, steps)
    if bench.on_gpu:
        kept = _kept_bytes(bench, variant, batch) / GIB
        limit = Limit(value=kept, what="weights, masters, moments, gradients")
        name = f"{variant.name}: peak memory"
        bench.say("train", name, "GiB", [steps.peak_bytes / GIB], limit=limit)
    return median(speeds) / at_best.value


def _report_optimizer(bench: Bench, variant: Variant, batch: Batch, steps: _Steps) -> None:
    number_bytes = bench.dtype.itemsize
    kept = bytes_per_weight(variant.optimizer, len(batch.micro_batches), number_bytes)
    moved = step_bytes_per_weight(kept, number_bytes) * bench.shape.parameters
    limit = Limit(
        value=moved / bench.rates.bandwidth * MS_PER_S,
        what=f"{number(moved / 1e9)} GB read and written",
    )
    times = [seconds * MS_PER_S for seconds in steps.optimizer_s]
    bench.say("train", f"{variant.name}: optimizer and write", "ms", times, limit=limit)


def _short(error: BaseException) -> str:
    """The first line says it."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
