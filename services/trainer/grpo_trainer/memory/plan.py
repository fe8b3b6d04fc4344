"""Plans the memory of trainer and server with the chosen options, and shows it as text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from grpo_core.cpu import is_slow_in_bfloat16
from grpo_trainer.config.optimizer import OptimizerName
from grpo_trainer.config.trainer import TrainerSettings
from grpo_trainer.errors import UnusableOptimizer
from grpo_trainer.memory.sizes import (
    GIB,
    KeptBytes,
    LayerSizes,
    Machine,
    kept_bytes,
    pass_bytes,
    update_bytes,
)
from grpo_trainer.model.adapter import trained_parameters, with_adapter
from grpo_trainer.model.download import ModelNotFound
from grpo_trainer.model.policy import CausalLM, train_only

DEFAULT_MODEL_LEN = 4096


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one choice of options.

    Args:
        policy: on the meta device
        kv_bytes: keys and values of the longest sequence, in the server
        master_dtype: float32 for an adapter
        kept: in the trainer, from step to step
        working_bytes: in the trainer for a short time, without and with --gradient-checkpointing
    """

    settings: TrainerSettings
    machine: Machine
    policy: CausalLM
    dtype: torch.dtype
    layers: int
    kv_bytes: int
    optimizer: OptimizerName
    kept: KeptBytes
    working_bytes: tuple[int, int]

    @property
    def weights_bytes(self) -> int:
        return sum(p.nbytes for p in self.policy.parameters())

    @property
    def least_server_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.machine.server_reserve

    @property
    def server_bytes(self) -> float:
        """What the server takes: on a GPU its share, even if it needs less."""
        if self.machine.is_gpu:
            return self.settings.gpu_memory_utilization * self.machine.total_bytes
        return self.least_server_bytes

    def trainer_bytes(self, is_recomputed: bool) -> int:
        """Highest memory of the trainer. Args: is_recomputed: with --gradient-checkpointing"""
        working = self.working_bytes[is_recomputed]
        return self.kept.total + working + self.machine.trainer_reserve

    def usable_utilization(self, is_recomputed: bool) -> float | None:
        """The given --gpu-memory-utilization if server and trainer fit with it; otherwise the
        largest one with which they do. None: there is none. On a CPU the option has no effect."""
        total, given = self.machine.total_bytes, self.settings.gpu_memory_utilization
        room = total - self.trainer_bytes(is_recomputed)
        if not self.machine.is_gpu:
            return given if room >= self.least_server_bytes else None
        usable = min(given, math.floor(100 * room / total) / 100)
        return usable if usable * total >= self.least_server_bytes else None


def memory_plan(settings: TrainerSettings) -> MemoryPlan:
    """Reads the model's configuration alone.

    Raises:
        ModelNotFound: the model has no configuration here or on the hub.
        PolicyMismatch: the model has no such layers or modules.
        UnusableOptimizer: --master-dtype does not fit the model's data type.
    """
    config = _text_config(settings.model)
    machine = Machine.find(settings.device)
    dtype = _dtype(settings, config, machine)
    if settings.master_dtype == "bfloat16" != name_of(dtype):
        raise UnusableOptimizer(
            f"--master-dtype bfloat16: the weights are in {name_of(dtype)}; pass "
            "--master-dtype float32, or --dtype bfloat16"
        )
    sizes, layers = LayerSizes.of(config, dtype.itemsize), int(config.num_hidden_layers)
    policy = _untrained_policy(settings, dtype)
    trained = list(trained_parameters(policy).values())
    optimizer = settings.optimizer_on("cuda" if machine.is_gpu else "cpu")
    micro_batches = settings.gradient_accumulation_steps
    update = update_bytes(
        trained, settings.master_dtype, micro_batches > 1, settings.weight_decay > 0
    )
    passes = [
        pass_bytes(
            sizes,
            tokens=settings.micro_batch_tokens,
            layers=layers - _first_trained_layer(settings),
            is_recomputed=is_recomputed,
            is_fused=settings.fused_head != "off",
            trains_head=bool(policy.get_output_embeddings().weight.requires_grad),
        )
        for is_recomputed in (False, True)
    ]
    longest = settings.max_model_len or min(config.max_position_embeddings, DEFAULT_MODEL_LEN)
    return MemoryPlan(
        settings=settings,
        machine=machine,
        policy=policy,
        dtype=dtype,
        layers=layers,
        kv_bytes=2 * layers * sizes.keys * sizes.element * longest,
        optimizer=optimizer,
        kept=kept_bytes(
            policy,
            optimizer,
            settings.master_dtype,
            micro_batches,
            copies=(settings.sync.mode != "shared_vllm") + _has_reference_copy(settings),
        ),
        working_bytes=(max(passes[0], update), max(passes[1], update)),
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


def _dtype(settings: TrainerSettings, config: Any, machine: Machine) -> torch.dtype:
    """The data type of the served weights."""
    if settings.dtype != "auto":
        found: torch.dtype = getattr(torch, settings.dtype)
        return found
    if not machine.is_gpu and is_slow_in_bfloat16():
        return torch.float32
    return config.dtype or torch.float32


def _untrained_policy(settings: TrainerSettings, dtype: torch.dtype) -> CausalLM:
    """On the meta device, which has shapes but no memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        config = AutoConfig.from_pretrained(settings.model)
        policy: CausalLM = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if settings.trained_layers is not None:
        train_only(policy, settings.trained_layers)
    return policy if settings.lora is None else with_adapter(policy, settings.lora)


def _first_trained_layer(settings: TrainerSettings) -> int:
    layers = settings.trained_layers if settings.lora is None else settings.lora.layers
    return min(layers or (0,))


def _has_reference_copy(settings: TrainerSettings) -> bool:
    """Whether the reference model is not the policy without its adapter."""
    is_other = settings.reference_model not in (None, settings.model)
    return settings.kl_coef > 0 and (settings.lora is None or is_other)


def text_of(plan: MemoryPlan) -> str:
    return "\n".join([_head(plan), _server(plan), _trainer(plan), _verdict(plan)])


def _head(plan: MemoryPlan) -> str:
    machine, weights = plan.machine, sum(p.numel() for p in plan.policy.parameters())
    total = f"{_gib(machine.total_bytes)} GiB"
    found = machine.name or "no GPU found, so this size is assumed"
    place = f"GPU      {total} ({found})" if machine.is_gpu else f"memory   {total} of this host"
    return (
        f"model    {plan.settings.model}: {weights / 1e9:.3g} billion weights, {plan.layers} "
        f"layers, {name_of(plan.dtype)}\n{place}, for trainer and server"
    )


def _server(plan: MemoryPlan) -> str:
    least = f"{_gib(plan.least_server_bytes)} GiB"
    share = (
        f"{_gib(plan.server_bytes)} GiB by --gpu-memory-utilization "
        f"{plan.settings.gpu_memory_utilization:g}; it needs {least} or more"
        if plan.machine.is_gpu
        else f"{least}, if --kv-cache-memory-bytes limits it"  # otherwise vLLM takes 92 %
    )
    parts = {
        "weights": plan.weights_bytes,
        "keys and values of one sequence": plan.kv_bytes,
        "engine (estimated)": plan.machine.server_reserve,
    }
    return f"server   {share}\n" + _lines(parts)


def _trainer(plan: MemoryPlan) -> str:
    settings, kept = plan.settings, plan.kept
    trained = sum(p.numel() for p in trained_parameters(plan.policy).values())
    per_weight = {
        f"master weights, {settings.master_dtype}": kept.masters,
        "gradients": kept.gradients,
        f"moments of {plan.optimizer}": kept.moments,
    }
    is_recomputed = settings.gradient_checkpointing
    activations = f"activations, logits and buffers of {settings.micro_batch_tokens:,} tokens"
    rest = "CUDA (estimated)" if plan.machine.is_gpu else "Python and its packages"
    parts = {
        **{f"{name}, {n / trained:.2f} bytes per weight": n for name, n in per_weight.items()},
        "copies of the model and of a reference model": kept.weights,
        f"{activations} (estimated)": plan.working_bytes[is_recomputed],
        rest: plan.machine.trainer_reserve,
    }
    return (
        f"trainer  {_gib(plan.trainer_bytes(is_recomputed))} GiB in mode {settings.sync.mode}, "
        f"which trains {trained / 1e9:.3g} billion weights\n"
    ) + _lines(parts)


def _lines(parts: Mapping[str, int]) -> str:
    return "".join(f"         {_gib(size):>5}  {name}\n" for name, size in parts.items())


def _verdict(plan: MemoryPlan) -> str:
    """Whether they fit, if necessary with --gradient-checkpointing or less for the server."""
    settings, total = plan.settings, _gib(plan.machine.total_bytes)
    is_recomputed = settings.gradient_checkpointing
    needed = _gib(plan.trainer_bytes(is_recomputed))
    found = f"trainer {needed} GiB + server {_gib(plan.server_bytes)} GiB of {total} GiB\n"
    for recomputes in sorted({is_recomputed, True}):
        usable = plan.usable_utilization(recomputes)
        if usable is None:
            continue
        changes = ["--gradient-checkpointing"] * (recomputes != is_recomputed)
        if usable != settings.gpu_memory_utilization:
            changes.append(f"--gpu-memory-utilization {usable:g}")
        return f"{found}They fit{' with ' * bool(changes)}{' '.join(changes)}\n"
    return (
        f"{found}They do not fit. Smaller: --optimizer adafactor, --master-dtype bfloat16,\n"
        "--tokens-per-micro-batch, --train-layer-indices, or an adapter (--mode lora_only)\n"
    )


def _gib(count: float) -> str:
    size = count / GIB
    return f"{size:.1f}" if size >= 0.1 or not size else f"{size:.3f}"
