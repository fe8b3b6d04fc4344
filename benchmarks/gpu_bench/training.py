"""The trainer's own step: gradients, optimizer, write; beside the GPU's rate of products."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
from pydantic import ValidationError
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_bench.bench import (
    GIB,
    MS_PER_S,
    Deadline,
    Goal,
    GpuBench,
    Limit,
    synchronize,
)
from benchmarks.gpu_bench.models import (
    GpuWork,
    ModelShape,
    ShapeName,
    random_policy,
    train_flops,
)
from benchmarks.report import number, table
from grpo_core.errors import GrpoError
from grpo_core.tree.objectives import GRPO
from grpo_core.tree.trainer import ForwardOptions, TrainerSettings
from grpo_core.tree.trainer_command import CommandLine, missing_packages
from grpo_core.wire.fields import MASKED, PROMPT_LOGPROB
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.advantages import with_advantages
from grpo_trainer.data.collate import Batch, collate
from grpo_trainer.data.cuts import by_length
from grpo_trainer.data.groups import GroupLimits, sequences_of
from grpo_trainer.errors import MissingPackage
from grpo_trainer.learner import accumulate_gradients
from grpo_trainer.memory_plan import kept_bytes
from grpo_trainer.model.forward import FastForward, build_forward_pass
from grpo_trainer.model.fused_head import EAGER
from grpo_trainer.optim.master_optimizer import MasterOptimizer, build_optimizer

Options = Mapping[str, object]
"""Of `TrainerSettings`, by the names of its fields."""

ADAMW: Options = {"optimizer": "adamw"}
ADAMW_8BIT: Options = {"optimizer": "adamw_8bit"}
ADAMW_8BIT_BFLOAT16: Options = {"optimizer": "adamw_8bit", "master_dtype": "bfloat16"}
ADAMW_BFLOAT16: Options = {"optimizer": "adamw", "master_dtype": "bfloat16"}
LR = 1e-6
GOALS: Mapping[ShapeName, float] = {"0.5b": 0.4}
GOAL = 0.45
"""Of the measured rate of matrix products; `GOALS` for small models."""
UPDATE_GOAL, PEAK_GOAL = 1.5, 1.6
"""Over their limits: of optimizer and write, and of the peak memory."""
WARM_UPS = 2
ALWAYS = 2
"""So many variants are measured without regard to time."""
KERNELS = 15
"""In the table of those that took the longest."""
KERNEL_NAME = 100
"""Characters."""
PROMPT_SHARE = 8
"""One in so many tokens of the shortest sequence belongs to the prompt of all sequences."""
META = torch.device("meta")


@dataclass(frozen=True)
class Variant:
    """`name`: as in the tables."""

    name: str
    forward: ForwardOptions
    optimizer: Options = field(default_factory=dict)


def variants(on_gpu: bool) -> list[Variant]:
    """The default and eager first; then what packing and the fused head add, and optimizers."""
    usual = ADAMW_8BIT if on_gpu and find_spec("bitsandbytes") else ADAMW
    eager = {"compile": False}
    ways = {
        "default": ForwardOptions(),
        "eager": ForwardOptions(**eager),
        "eager, padded": ForwardOptions(packing="off", **eager),
        "eager, padded, all logits": ForwardOptions(packing="off", fused_head="off", **eager),
    }
    others = (ADAMW, ADAMW_8BIT, ADAMW_8BIT_BFLOAT16, ADAMW_BFLOAT16)
    return [
        *(Variant(f"{n}; {optimizer_name(usual)}", way, usual) for n, way in ways.items()),
        *(
            Variant(f"default; {optimizer_name(options)}", ForwardOptions(), options)
            for options in others
            if options != usual
        ),
    ]


def optimizer_beside_server(size: ShapeName) -> Options:
    """The default or, of the largest model, one that leaves memory for a server."""
    return ADAMW_8BIT_BFLOAT16 if size == "7b" else ADAMW


def optimizer_name(options: Options) -> str:
    masters = options.get("master_dtype", "float32")
    return f"{options['optimizer']}, {masters} masters"


def random_batch(shape: ModelShape, work: GpuWork, seed: int) -> Batch:
    """One group: a prompt, and completions that make sequences of the work's lengths. Their
    logprobs are those of a policy of random weights."""
    generator = random.Random(seed)
    step = (work.longest - work.shortest) / (work.sequences - 1)
    lengths = [round(work.shortest + step * i) for i in range(work.sequences)]
    generator.shuffle(lengths)
    vocabulary = range(shape.vocabulary)
    prompt = generator.choices(vocabulary, k=max(1, work.shortest // PROMPT_SHARE))
    completions = [generator.choices(vocabulary, k=n - len(prompt)) for n in lengths]
    likelihood = -math.log(shape.vocabulary)
    group = ScoredGroup(
        tokens=[prompt + completion for completion in completions],
        masks=[[MASKED] * len(prompt) + completion for completion in completions],
        scores=[float(i % 2) for i in range(len(completions))],
        inference_logprobs=[
            [PROMPT_LOGPROB] * len(prompt) + [likelihood] * len(completion)
            for completion in completions
        ],
    )
    usable = sequences_of([group], GroupLimits(shape.vocabulary, work.longest))
    budget = work.micro_batch * work.longest
    return with_advantages(collate(usable, work.longest, budget, by_length, GRPO), GRPO)


@dataclass(frozen=True)
class Trainee:
    """`batch`: the same in every step."""

    policy: Any
    optimizer: MasterOptimizer
    forward: FastForward
    batch: Batch

    def gather(self, step: int) -> None:
        """The gradients of the batch, into the optimizer."""
        accumulate_gradients(self.policy, self.batch, GRPO, step, self.forward, self.optimizer)


def settings_of(options: Options, batch: Batch) -> TrainerSettings:
    """Of a trainer that takes the batch as one step."""
    passes = len(batch.micro_batches)
    usual = {"model": "random", "mode": "shared_vllm", "lr": LR}
    given = {**usual, "gradient_accumulation_steps": passes, **options}
    return CommandLine.model_validate(given).settings()


def trainee_of(
    policy: Any, settings: TrainerSettings, forward: ForwardOptions, batch: Batch
) -> Trainee:
    """Raises the trainer's errors if the policy or the machine does not allow the settings."""
    if missing := [message for _, message in missing_packages(settings)]:
        raise MissingPackage("; ".join(missing))
    return Trainee(
        policy=policy,
        optimizer=build_optimizer(policy, settings),
        forward=build_forward_pass(policy, forward),
        batch=batch,
    )


STAGES = ("gradients", "optimizer", "write")
Times = tuple[float, float, float]
"""Seconds of the stages of a step."""


def measure_training(bench: GpuBench, until: Deadline) -> None:
    """A variant that does not fit, or lacks a package, is left out with the reason."""
    bench.stop_servers()
    measured = variants(bench.on_gpu)
    batch = random_batch(bench.shape, bench.work, seed=0)
    for index, variant in enumerate(measured):
        if index >= ALWAYS and not until.left_s:
            bench.leave_out(variant.name, "the time was up")
            continue
        try:
            _measure(bench, variant, batch, until.share(len(measured) - index), index < ALWAYS)
        except (GrpoError, ValidationError, ImportError, RuntimeError) as error:
            bench.leave_out(variant.name, f"{type(error).__name__}: {error}")
        finally:
            free_memory()
            torch.compiler.reset()


def free_memory() -> None:
    """Return the memory of unused tensors to the driver."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def _measure(
    bench: GpuBench, variant: Variant, batch: Batch, until: Deadline, is_profiled: bool
) -> None:
    policy = random_policy(bench.size, bench.dtype, bench.device)
    settings, work = settings_of(variant.optimizer, batch), bench.work
    trainee, times = trainee_of(policy, settings, variant.forward, batch), list[Times]()
    for step in range(WARM_UPS):
        _one(trainee, step, bench.device)
    if bench.on_gpu:
        torch.cuda.reset_peak_memory_stats(bench.device)
    for step in range(WARM_UPS, WARM_UPS + work.steps):
        if len(times) >= work.min_steps and not until.left_s:
            break
        times.append(_one(trainee, step, bench.device))
    is_compiled = trainee.forward.head not in (None, EAGER)
    name = variant.name.replace(";", ", compiled;", 1) if is_compiled else variant.name
    _say_speed(bench, name, batch, times)
    _say_update_and_memory(bench, name, settings, times)
    if is_profiled:
        kernels = _kernels(trainee, WARM_UPS + work.steps, bench.device)
        bench.add([f"What took the longest in one step of *{name}*:", "", *kernels])


def _one(trainee: Trainee, step: int, device: torch.device) -> Times:
    times = [time.perf_counter()]
    for work in (
        lambda: trainee.gather(step),
        lambda: trainee.optimizer.step(step),
        trainee.optimizer.write_into_parameters,
    ):
        work()
        synchronize(device)
        times.append(time.perf_counter())
    gathered, stepped, written = (after - before for before, after in pairwise(times))
    return gathered, stepped, written


def _kernels(trainee: Trainee, step: int, device: torch.device) -> list[str]:
    """A table of the kernels of one step; without a GPU, of the operators."""
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        _one(trainee, step, device)
    kind = "CUDA" if on_gpu else "CPU"
    found = [event for event in profiler.key_averages() if event.device_type.name == kind]

    def ms(event: Any) -> float:
        value = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        return float(value) / 1e3

    total = sum(map(ms, found))
    rows = [["kernel" if on_gpu else "operator", "calls", "ms", f"share of {number(total)} ms"]]
    for event in sorted(found, key=ms, reverse=True)[:KERNELS]:
        name = event.key.replace("|", "/")[:KERNEL_NAME]
        rows.append([f"`{name}`", str(event.count), number(ms(event)), f"{ms(event) / total:.3f}"])
    return table(rows)


def _say_speed(bench: GpuBench, name: str, batch: Batch, times: list[Times]) -> None:
    # Positions that go through the model, without padding.
    lengths = [length for micro in batch.micro_batches for length in micro.lengths]
    tokens, flops = sum(lengths), train_flops(bench.shape, lengths)
    reason = f"{flops / tokens / 1e9:.3g} GFLOP a token at the measured rate"
    limit = Limit(tokens / flops * bench.rates.flops, reason)
    goal = Goal(GOALS.get(bench.size, GOAL))
    bench.say(name, "tokens/s", [tokens / sum(each) for each in times], limit, goal)


def _say_update_and_memory(
    bench: GpuBench, name: str, settings: TrainerSettings, times: list[Times]
) -> None:
    shapes = random_policy(bench.size, bench.dtype, META)
    kept = kept_bytes(settings, shapes, settings.optimizer_on(bench.device.type))
    weights = sum(p.nbytes for p in shapes.parameters())
    # A result that is rounded for the model is staged, then read and written.
    staged = 0 if settings.master_dtype == str(bench.dtype).removeprefix("torch.") else weights
    moved = kept.gradients + 2 * (kept.masters + kept.moments) + staged + 2 * weights
    for label, seconds in zip(STAGES, zip(*times, strict=True), strict=True):
        bench.say(f"{name}: {label}", "ms", [each * MS_PER_S for each in seconds])
    reason = f"{number(moved / 1e9)} GB read and written"
    limit = Limit(moved / bench.rates.bandwidth * MS_PER_S, reason)
    values, goal = [sum(each[1:]) * MS_PER_S for each in times], Goal(UPDATE_GOAL, is_highest=True)
    bench.say(f"{name}: optimizer and write", "ms", values, limit, goal)
    if bench.on_gpu:
        peak = torch.cuda.max_memory_allocated(bench.device) / GIB
        limit = Limit((weights + kept.total) / GIB, "weights, masters, moments, gradients")
        goal = Goal(PEAK_GOAL, is_highest=True)
        bench.say(f"{name}: peak memory", "GiB", [peak], limit, goal)
