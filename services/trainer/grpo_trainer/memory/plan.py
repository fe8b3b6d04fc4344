"""Plans the memory of every combination of options, and which of them fit on one GPU or host."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from grpo_core.process.cpu_types import is_slow_in_bfloat16
from grpo_trainer.config.cli import CommandLine
from grpo_trainer.config.optimizer import OptimizerName
from grpo_trainer.config.trainer import AUTO_DEVICE
from grpo_trainer.errors import UnusableOptimizer
from grpo_trainer.memory.kept import MASTER_BYTES, KeptBytes, kept_bytes, planned_policy
from grpo_trainer.memory.working import LayerSizes, pass_bytes, update_bytes
from grpo_trainer.model.adapter import trained_parameters
from grpo_trainer.model.download import ModelNotFound
from grpo_trainer.model.policy_protocol import CausalLM

GIB, MIB = 2**30, 2**20
TRAINER_ON_GPU = GIB
"""Estimate: the trainer's CUDA context, workspaces of libraries, and gaps between tensors."""
SERVER_ON_GPU = 2 * GIB
"""Estimate: the engine's CUDA context, activations and CUDA graphs."""
TRAINER_ON_CPU = 512 * MIB
"""Python, torch and transformers."""
SERVER_ON_CPU = 1200 * MIB
"""Python, torch, vLLM, and the workspaces of an engine."""
ASSUMED_GPU_BYTES = 80 * GIB
"""Used for --device cuda if this machine has no GPU."""
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
DEFAULT_MODEL_LEN = 4096
WHOLE = "all"
ADAPTER_MODES = "lora_only, lora_restart"


@dataclass(frozen=True)
class Machine:
    """Where server and trainer compute: on one GPU, or on the CPU of this host.

    Args:
        name: of the GPU; None if one is assumed
        total_bytes: the GPU's memory, or the host's
        trainer_reserve, server_reserve: bytes that each process needs beside what the plan counts
    """

    is_gpu: bool
    name: str | None
    total_bytes: int
    trainer_reserve: int
    server_reserve: int

    @classmethod
    def find(cls, device: str) -> Machine:
        """Args: device: the value of --device."""
        is_gpu = torch.cuda.is_available() if device == AUTO_DEVICE else device.startswith("cuda")
        if not is_gpu:
            return cls(False, None, _host_bytes(), TRAINER_ON_CPU, SERVER_ON_CPU)
        if not torch.cuda.is_available():
            return cls(True, None, ASSUMED_GPU_BYTES, TRAINER_ON_GPU, SERVER_ON_GPU)
        found = torch.cuda.get_device_properties(device if device.startswith("cuda") else "cuda")
        return cls(True, found.name, found.total_memory, TRAINER_ON_GPU, SERVER_ON_GPU)


def _host_bytes() -> int:
    """This host's memory, or what the container may use of it."""
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.exists() else ""
    return min(host, int(limit)) if limit.isdecimal() else host


@dataclass(frozen=True)
class Server:
    """The engine's memory. `kv_bytes`: keys and values of the longest sequence."""

    weights_bytes: int
    kv_bytes: int
    reserve_bytes: int

    @property
    def least_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.reserve_bytes


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
    machine: Machine
    server: Server
    utilization: float
    is_recomputed: bool
    combinations: list[Combination]
    chosen: Combination
    micro_batch_tokens: int

    def usable_utilization(self, combination: Combination, is_recomputed: bool) -> float | None:
        """The given --gpu-memory-utilization if server and trainer fit with it; otherwise the
        largest one with which they do. None: there is none. On a CPU the option has no effect."""
        total = self.machine.total_bytes
        room = total - combination.needed(is_recomputed) - self.machine.trainer_reserve
        if not self.machine.is_gpu:
            return self.utilization if room >= self.server.least_bytes else None
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
    machine = Machine.find(line.device)
    dtype = _dtype(line, config, machine)
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
        machine=machine,
        server=Server(
            weights_bytes=sum(p.nbytes for p in model.parameters()),
            kv_bytes=2 * config.num_hidden_layers * sizes.keys * sizes.element * longest,
            reserve_bytes=machine.server_reserve,
        ),
        utilization=line.gpu_memory_utilization,
        is_recomputed=line.gradient_checkpointing,
        combinations=combinations,
        chosen=next(one for one in combinations if _is_chosen(line, one, machine)),
        micro_batch_tokens=line.micro_batch_tokens,
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


def _dtype(line: CommandLine, config: Any, machine: Machine) -> torch.dtype:
    """The data type of the served weights."""
    if line.dtype != "auto":
        found: torch.dtype = getattr(torch, line.dtype)
        return found
    if not machine.is_gpu and is_slow_in_bfloat16():
        return torch.float32
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


def _is_chosen(line: CommandLine, one: Combination, machine: Machine) -> bool:
    trainee = one.trainee
    optimizer = line.optimizer_on("cuda" if machine.is_gpu else "cpu")
    if line.mode not in trainee.modes.split(", ") or one.optimizer != optimizer:
        return False
    trains_all = line.trained_layers is None
    return trainee.is_adapter or (
        trains_all == (trainee.layers == WHOLE) and one.master_dtype == line.master_dtype
    )
