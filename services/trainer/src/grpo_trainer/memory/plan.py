"""Plans the memory of every combination of options, and which of them fit on one GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

import torch

from grpo_trainer.config.cli import CommandLine
from grpo_trainer.config.optimizer import OptimizerName
from grpo_trainer.errors import UnusableOptimizer
from grpo_trainer.memory.kept import MASTER_BYTES, KeptBytes, kept_bytes, planned_policy
from grpo_trainer.memory.working import LayerSizes, pass_bytes, update_bytes
from grpo_trainer.model.adapter import trained_parameters
from grpo_trainer.model.download import ModelNotFound
from grpo_trainer.model.policy_protocol import CausalLM

GIB = 2**30
ASSUMED_GPU_BYTES = 80 * GIB
"""Used if this machine has no GPU."""
TRAINER_RESERVE_BYTES = GIB
"""Estimate: the trainer's CUDA context, workspaces of libraries, and gaps between tensors."""
SERVER_RESERVE_BYTES = 2 * GIB
"""Estimate: the engine's CUDA context, activations and CUDA graphs."""
DEFAULT_MODEL_LEN = 4096
WHOLE = "all"
ADAPTER_MODES = "lora_only, lora_restart"


@dataclass(frozen=True)
class Gpu:
    """`name` is None if this machine has no GPU, so that one is assumed."""

    name: str | None
    total_bytes: int

    @classmethod
    def find(cls, device: str) -> Gpu:
        """Args: device: the value of --device."""
        if not torch.cuda.is_available():
            return cls(None, ASSUMED_GPU_BYTES)
        found = torch.cuda.get_device_properties(device if device.startswith("cuda") else "cuda")
        return cls(found.name, found.total_memory)


@dataclass(frozen=True)
class Server:
    """The engine's memory. `kv_bytes`: keys and values of the longest sequence."""

    weights_bytes: int
    kv_bytes: int

    @property
    def least_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + SERVER_RESERVE_BYTES


@dataclass(frozen=True)
class Trainee:
    """One choice of trained weights. `modes`: those that need the same memory. `layers`: numbers of
    the trained layers, "all", or the adapter."""

    modes: str
    layers: str
    policy: CausalLM
    first_layer: int

    @property
    def is_adapter(self) -> bool:
        return self.modes == ADAPTER_MODES


@dataclass(frozen=True)
class Combination:
    """One row of the plan. `working_bytes`: without and with --gradient-checkpointing."""

    trainee: Trainee
    optimizer: OptimizerName
    master_dtype: str
    kept: KeptBytes
    working_bytes: tuple[int, int]

    def needed(self, is_recomputed: bool) -> int:
        """Highest memory of the trainer, in bytes."""
        return self.kept.total + self.working_bytes[is_recomputed]


@dataclass(frozen=True)
class MemoryPlan:
    model: str
    dtype: torch.dtype
    layers: int
    gpu: Gpu
    server: Server
    utilization: float
    is_recomputed: bool
    combinations: list[Combination]
    chosen: Combination

    def usable_utilization(self, combination: Combination, is_recomputed: bool) -> float | None:
        """The given --gpu-memory-utilization if server and trainer fit with it; otherwise the
        largest one with which they do. None: there is none."""
        total = self.gpu.total_bytes
        room = total - combination.needed(is_recomputed) - TRAINER_RESERVE_BYTES
        largest = math.floor(100 * room / total) / 100
        best = min(largest, self.utilization)
        for utilization in (best, largest):
            if utilization * total >= self.server.least_bytes:
                return utilization
        return None


def memory_plan(line: CommandLine) -> MemoryPlan:
    """Raises:
    ModelNotFound: the model has no configuration here or on the hub.
    PolicyMismatch: the model has no such layers or modules.
    UnusableOptimizer: --master-dtype does not fit the model's data type.
    """
    config = _text_config(line.model)
    dtype = _dtype(line, config)
    if line.master_dtype == "bfloat16" != name_of(dtype):
        raise UnusableOptimizer(
            f"--master-dtype bfloat16: the weights are in {name_of(dtype)}; pass "
            "--master-dtype float32, or --dtype bfloat16"
        )
    sizes = LayerSizes.of(config, dtype.itemsize)
    combinations = [
        combination
        for trainee in _trainees(line, dtype, config.num_hidden_layers)
        for combination in _combinations(line, trainee, sizes, config.num_hidden_layers)
    ]
    model = combinations[0].trainee.policy
    longest = line.max_model_len or min(config.max_position_embeddings, DEFAULT_MODEL_LEN)
    return MemoryPlan(
        model=line.model,
        dtype=dtype,
        layers=config.num_hidden_layers,
        gpu=Gpu.find(line.device),
        server=Server(
            weights_bytes=sum(p.nbytes for p in model.parameters()),
            kv_bytes=2 * config.num_hidden_layers * sizes.keys * sizes.element * longest,
        ),
        utilization=line.gpu_memory_utilization,
        is_recomputed=line.gradient_checkpointing,
        combinations=combinations,
        chosen=next(one for one in combinations if _is_chosen(line, one)),
    )


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _text_config(model: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model).get_text_config()
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise ModelNotFound(f"--model {model}: cannot read its config.json: {reason}") from error


def _dtype(line: CommandLine, config: Any) -> torch.dtype:
    if line.dtype != "auto":
        found: torch.dtype = getattr(torch, line.dtype)
        return found
    return config.dtype or torch.float32


def _trainees(line: CommandLine, dtype: torch.dtype, layers: int) -> Iterator[Trainee]:
    """Both full-model modes with the whole model and with frozen layers, then the adapter."""
    chosen = line.trained_layers or tuple(range(3 * layers // 4, layers))
    whole = planned_policy(line.model, dtype)
    some = planned_policy(line.model, dtype, trained_layers=chosen)
    for mode in ("shared_vllm", "none"):
        yield Trainee(mode, WHOLE, whole, 0)
        yield Trainee(mode, _ranges(chosen), some, min(chosen))
    adapted = planned_policy(line.model, dtype, lora=line.lora)
    yield Trainee(ADAPTER_MODES, f"adapter r={line.lora_r}", adapted, min(line.lora.layers or (0,)))


def _ranges(indices: tuple[int, ...]) -> str:
    """0, 1, 2, 3, 28 → 0-3,28"""
    # Within a range, the difference between a number and its place is constant.
    found = itertools.groupby(enumerate(indices), key=lambda item: item[1] - item[0])
    runs = [[index for _, index in run] for _, run in found]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _combinations(
    line: CommandLine, trainee: Trainee, sizes: LayerSizes, layers: int
) -> Iterator[Combination]:
    trained = list(trained_parameters(trainee.policy).values())
    head = trainee.policy.get_output_embeddings().weight
    micro_batches = line.gradient_accumulation_steps
    passes = [
        pass_bytes(
            sizes,
            tokens=line.micro_batch_tokens,
            layers=layers - trainee.first_layer,
            is_recomputed=is_recomputed,
            is_fused=line.fused_head != "off",
            trains_head=bool(head.requires_grad),
        )
        for is_recomputed in (False, True)
    ]
    # An adapter is trained in float32; bfloat16 master weights need weights in bfloat16.
    is_bfloat16 = trained[0].dtype == torch.bfloat16
    for optimizer in get_args(OptimizerName):
        for master_dtype in MASTER_BYTES if is_bfloat16 else ("float32",):
            update = update_bytes(trained, master_dtype, micro_batches > 1, line.weight_decay > 0)
            yield Combination(
                trainee=trainee,
                optimizer=optimizer,
                master_dtype=master_dtype,
                kept=kept_bytes(
                    trainee.policy,
                    optimizer,
                    master_dtype,
                    micro_batches,
                    is_shared=trainee.modes == "shared_vllm",
                    has_reference=line.kl_coef > 0
                    and (not trainee.is_adapter or line.reference_model not in (None, line.model)),
                ),
                working_bytes=(max(passes[0], update), max(passes[1], update)),
            )


def _is_chosen(line: CommandLine, one: Combination) -> bool:
    trainee = one.trainee
    if line.mode not in trainee.modes.split(", ") or one.optimizer != _optimizer(line):
        return False
    trains_all = line.trained_layers is None
    return trainee.is_adapter or (
        trains_all == (trainee.layers == WHOLE) and one.master_dtype == line.master_dtype
    )


def _optimizer(line: CommandLine) -> OptimizerName:
    return line.optimizer_on("cpu" if line.device == "cpu" else "cuda")
