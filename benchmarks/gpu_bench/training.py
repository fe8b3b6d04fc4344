"""The trainer's own step: gradients, optimizer, write; beside the GPU's rate of products."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from pydantic import ValidationError

from benchmarks.gpu_bench.bench import (
    GIB,
    MS_PER_S,
    TIME_IS_UP,
    GpuBench,
    at_least,
    give_memory_back,
    synchronize,
)
from benchmarks.gpu_bench.report import Limit, number
from benchmarks.gpu_bench.servers import random_policy
from benchmarks.gpu_bench.settings import (
    GpuDeadline,
    ModelShape,
    ShapeName,
    TrainWork,
    evenly_spread,
    train_flops,
)
from grpo_core.errors import GrpoError
from grpo_core.tree.objectives import GRPO
from grpo_core.tree.trainer import ForwardOptions, TrainerSettings
from grpo_core.tree.trainer_command import CommandLine, missing_packages
from grpo_core.wire.fields import MASKED, PROMPT_LOGPROB
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.advantages import with_advantages
from grpo_trainer.data.collate import Batch, by_length, collate
from grpo_trainer.data.groups import GroupLimits, usable_group
from grpo_trainer.errors import MissingPackage
from grpo_trainer.learner import accumulate_gradients
from grpo_trainer.model.forward import ForwardPass, build_forward_pass
from grpo_trainer.optim.master_optimizer import MasterOptimizer, build_optimizer

Options = Mapping[str, object]
"""Of `TrainerSettings`, by the names of its fields."""

ADAMW: Options = {}
ADAMW_8BIT: Options = {"optimizer": "adamw_8bit"}
ADAMW_8BIT_BFLOAT16: Options = {"optimizer": "adamw_8bit", "master_dtype": "bfloat16"}
ADAMW_BFLOAT16: Options = {"master_dtype": "bfloat16"}


@dataclass(frozen=True)
class Variant:
    """`name`: as in the tables."""

    name: str
    forward: ForwardOptions
    optimizer: Options = field(default_factory=dict)


def forward_variants(optimizer: Options) -> list[Variant]:
    """Each with one more of what makes the pass faster."""
    ways = {
        "padded": ForwardOptions(packing="off", fused_head="off", compile=False),
        "padded, fused head": ForwardOptions(packing="off", fused_head="on", compile=False),
        "packed, fused head": ForwardOptions(packing="on", fused_head="on", compile=False),
        "packed, fused head, compiled": ForwardOptions(packing="on", fused_head="on", compile=True),
    }
    label = optimizer_name(optimizer)
    return [Variant(f"{name}; {label}", forward, optimizer) for name, forward in ways.items()]


def optimizer_variants(besides: Options) -> list[Variant]:
    """The others than `besides`, with the forward pass that the trainer takes by default."""
    forward = ForwardOptions()
    return [
        Variant(f"default; {optimizer_name(options)}", forward, options)
        for options in (ADAMW, ADAMW_8BIT, ADAMW_8BIT_BFLOAT16, ADAMW_BFLOAT16)
        if options != besides
    ]


def usual_optimizer(size: ShapeName) -> Options:
    """What the forward variants are measured with: the default, where it fits the GPU."""
    if size != "7b":
        return ADAMW
    return ADAMW_8BIT if find_spec("bitsandbytes") else ADAMW_BFLOAT16


def optimizer_beside_server(size: ShapeName) -> Options:
    """The same with a server on the GPU."""
    return ADAMW_8BIT_BFLOAT16 if size == "7b" else ADAMW


def optimizer_name(options: Options) -> str:
    masters = options.get("master_dtype", "float32")
    return f"{options.get('optimizer', 'adamw')}, {masters} masters"


PROMPT_SHARE = 8
"""One in so many tokens of the shortest sequence is the prompt's, in all of them."""


def random_batch(shape: ModelShape, work: TrainWork, seed: int) -> Batch:
    """One group: a prompt, and completions that make sequences of the work's lengths. They are as
    likely as a policy of random weights finds them."""
    generator = random.Random(seed)
    lengths = evenly_spread(work.shortest, work.longest, work.sequences)
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
    usable = [usable_group(0, group, GroupLimits(shape.vocabulary, work.longest))]
    budget = work.micro_batch * work.longest
    return with_advantages(collate(usable, work.longest, budget, by_length, GRPO), GRPO)


def trained_lengths(batch: Batch) -> list[int]:
    """Positions of each sequence that go through the model, padding left out."""
    return [length for micro in batch.micro_batches for length in micro.lengths]


LR = 1e-6


@dataclass(frozen=True)
class Trainee:
    """`batch`: the same in every step."""

    policy: Any
    optimizer: MasterOptimizer
    forward: ForwardPass
    batch: Batch

    def gather(self, step: int) -> None:
        """The gradients of the batch, into the optimizer."""
        accumulate_gradients(self.policy, self.batch, GRPO, step, self.forward)


def trainee_of(policy: Any, variant: Variant, batch: Batch) -> Trainee:
    """Raises what the trainer raises if the policy or the machine does not allow the variant."""
    settings = settings_with(variant.optimizer)
    if missing := [message for _, message in missing_packages(settings)]:
        raise MissingPackage("; ".join(missing))
    return Trainee(
        policy=policy,
        optimizer=build_optimizer(policy, settings),
        forward=build_forward_pass(policy, variant.forward),
        batch=batch,
    )


def settings_with(options: Options) -> TrainerSettings:
    """Raises `pydantic.ValidationError` where the trainer has no such options."""
    fields = {
        "model": "random",
        "mode": "shared_vllm",
        "lr": LR,
        **options,
    }
    return CommandLine.model_validate(fields).settings()


FLOAT32_BYTES, BFLOAT16_BYTES = 4, 2
MOMENTS_8BIT_BYTES = 2 * (1 + FLOAT32_BYTES / 256)
"""Two moments of a byte, with a float32 scale for every 256."""


@dataclass(frozen=True)
class BytesPerWeight:
    """`gradients`: where the last of them has been gathered; the staging copy takes their place."""

    weights: float
    masters: float
    moments: float
    gradients: float

    @property
    def total(self) -> float:
        return self.weights + self.masters + self.moments + self.gradients


def bytes_per_weight(
    options: Mapping[str, object], micro_batches: int, number_bytes: int
) -> BytesPerWeight:
    """Args:
    options: of `TrainerSettings`; what is left out has its default
    number_bytes: of a served weight
    """
    is_8bit = options.get("optimizer") == "adamw_8bit"
    is_bfloat16 = options.get("master_dtype") == "bfloat16"
    return BytesPerWeight(
        weights=number_bytes,
        masters=BFLOAT16_BYTES if is_bfloat16 else FLOAT32_BYTES,
        moments=MOMENTS_8BIT_BYTES if is_8bit else 2 * FLOAT32_BYTES,
        # From the second backward pass on gradients are added up in float32.
        gradients=number_bytes if micro_batches == 1 else FLOAT32_BYTES,
    )


def step_bytes_per_weight(kept: BytesPerWeight, number_bytes: int) -> float:
    """Read and written by one optimizer step in one pass, and by the write after it: the gradient
    read, masters and moments read and written, the weights to serve staged where the masters are of
    another type, and then copied."""
    staged = 0 if kept.masters == number_bytes else number_bytes
    return kept.gradients + 2 * (kept.masters + kept.moments) + staged + 2 * number_bytes


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


def measure_training(bench: GpuBench, deadline: GpuDeadline) -> None:
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


def _why_too_large(bench: GpuBench, variant: Variant, batch: Batch) -> str | None:
    if not bench.on_gpu:
        return None
    needed = _kept_bytes(bench, variant, batch)
    there = torch.cuda.get_device_properties(bench.device).total_memory
    if needed <= FITS * there:
        return None
    return f"what it keeps is {needed / GIB:.0f} GiB of the GPU's {there / GIB:.0f}"


def _kept_bytes(bench: GpuBench, variant: Variant, batch: Batch) -> float:
    kept = bytes_per_weight(variant.optimizer, len(batch.micro_batches), bench.dtype.itemsize)
    return kept.total * bench.shape.parameters


def _steps(bench: GpuBench, variant: Variant, batch: Batch, until: GpuDeadline) -> _Steps:
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


def _report(bench: GpuBench, variant: Variant, batch: Batch, steps: _Steps) -> float:
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


def _report_optimizer(bench: GpuBench, variant: Variant, batch: Batch, steps: _Steps) -> None:
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
