"""The trainer's own step: gradients, optimizer, write; beside the GPU's rate of products."""

from __future__ import annotations

import gc
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
from grpo_core.errors import GrpoError
from grpo_core.tree.objectives import GRPO
from grpo_core.tree.trainer import ForwardOptions
from grpo_core.tree.trainer_command import CommandLine, missing_packages
from grpo_core.wire.fields import MASKED, PROMPT_LOGPROB
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.advantages import with_advantages
from grpo_trainer.data.collate import Batch, by_length, collate
from grpo_trainer.data.groups import GroupLimits, sequences_of
from grpo_trainer.errors import MissingPackage
from grpo_trainer.learner import accumulate_gradients
from grpo_trainer.model.forward import ForwardPass, build_forward_pass
from grpo_trainer.optim.master_optimizer import MasterOptimizer, build_optimizer

Options = Mapping[str, object]
"""Of `TrainerSettings`, by the names of its fields."""

ADAMW: Options = {"optimizer": "adamw"}
ADAMW_8BIT: Options = {"optimizer": "adamw_8bit"}
ADAMW_8BIT_BFLOAT16: Options = {"optimizer": "adamw_8bit", "master_dtype": "bfloat16"}
ADAMW_BFLOAT16: Options = {"optimizer": "adamw", "master_dtype": "bfloat16"}
LR = 1e-6
GOAL = 0.45
"""Of the measured rate of matrix products."""
WARM_UPS = 2
PROMPT_SHARE = 8
"""One in so many tokens of the shortest sequence belongs to the prompt of all sequences."""


@dataclass(frozen=True)
class Variant:
    """`name`: as in the tables."""

    name: str
    forward: ForwardOptions
    optimizer: Options = field(default_factory=dict)


def variants(size: ShapeName) -> list[Variant]:
    """Forward passes, each with one more feature that makes it faster, and optimizers."""
    usual = ADAMW
    if size == "7b":  # the default does not fit the GPU
        usual = ADAMW_8BIT if find_spec("bitsandbytes") else ADAMW_BFLOAT16
    ways = {
        "padded": ForwardOptions(packing="off", fused_head="off", compile=False),
        "padded, fused head": ForwardOptions(packing="off", fused_head="on", compile=False),
        "packed, fused head": ForwardOptions(packing="on", fused_head="on", compile=False),
        "packed, fused head, compiled": ForwardOptions(packing="on", fused_head="on", compile=True),
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
    forward: ForwardPass
    batch: Batch

    def gather(self, step: int) -> None:
        """The gradients of the batch, into the optimizer."""
        accumulate_gradients(self.policy, self.batch, GRPO, step, self.forward, self.optimizer)


def trainee_of(policy: Any, variant: Variant, batch: Batch) -> Trainee:
    """Raises the trainer's errors if the policy or the machine does not allow the variant."""
    fields = {"model": "random", "mode": "shared_vllm", "lr": LR, **variant.optimizer}
    settings = CommandLine.model_validate(fields).settings()
    if missing := [message for _, message in missing_packages(settings)]:
        raise MissingPackage("; ".join(missing))
    return Trainee(
        policy=policy,
        optimizer=build_optimizer(policy, settings),
        forward=build_forward_pass(policy, variant.forward),
        batch=batch,
    )


@dataclass
class _Steps:
    """Seconds of whole steps, and of optimizer and write; the highest number of bytes."""

    whole_s: list[float] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0


def measure_training(bench: GpuBench, until: Deadline) -> None:
    """A variant that does not fit, or lacks a package, is left out with the reason."""
    bench.stop_servers()
    measured = variants(bench.size)
    batch = random_batch(bench.shape, bench.work, seed=0)
    best = 0.0
    for index, variant in enumerate(measured):
        if not until.left_s:
            bench.leave_out(variant.name, "the time was up")
            continue
        try:
            steps = _steps(bench, variant, batch, until.share(len(measured) - index))
            best = max(best, _report(bench, variant, batch, steps))
        except (GrpoError, ValidationError, ImportError, RuntimeError) as error:
            bench.leave_out(variant.name, f"{type(error).__name__}: {error}")
        finally:
            free_memory()
            torch.compiler.reset()
    if best:
        name = "model FLOPs of the best over measured matrix products"
        bench.say(name, "", [best], goal=Goal(GOAL))


def free_memory() -> None:
    """Return the memory of unused tensors to the driver."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def _steps(bench: GpuBench, variant: Variant, batch: Batch, until: Deadline) -> _Steps:
    policy = random_policy(bench.size, bench.dtype, bench.device)
    trainee = trainee_of(policy, variant, batch)
    for step in range(WARM_UPS):
        _one(trainee, step, bench.device)
    if bench.on_gpu:
        torch.cuda.reset_peak_memory_stats(bench.device)
    work, steps = bench.work, _Steps()
    for step in range(WARM_UPS, WARM_UPS + work.steps):
        if len(steps.whole_s) >= work.min_steps and not until.left_s:
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
    # Positions that go through the model, without padding.
    lengths = [length for micro in batch.micro_batches for length in micro.lengths]
    tokens, flops = sum(lengths), train_flops(bench.shape, lengths)
    speeds = [tokens / seconds for seconds in steps.whole_s]
    at_best = Limit(
        tokens / flops * bench.rates.flops,
        f"{flops / tokens / 1e9:.3g} GFLOP a token at the measured rate",
    )
    bench.say(variant.name, "tokens/s", speeds, at_best)
    times = [seconds * MS_PER_S for seconds in steps.optimizer_s]
    bench.say(f"{variant.name}: optimizer and write", "ms", times)
    if bench.on_gpu:
        bench.say(f"{variant.name}: peak memory", "GiB", [steps.peak_bytes / GIB])
    return median(speeds) / at_best.value
