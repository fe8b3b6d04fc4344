"""Plans the memory of trainer and server with the chosen options, and shows it as text.

Kept from step to step, and exact, from the parameters' shapes: weights, master weights, the
optimizer's moments, and between the first backward pass and the update the gradients.

Needed for a short time, and estimated: activations, logits and buffers. The activations are those
of a layer of Llama or Qwen2: two norms, attention with rotary positions, and a gated MLP. Other
architectures differ by up to a quarter.

On GPUs the plan also chooses how many tokens a micro-batch has, unless the user does.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor

from grpo_core import cpu
from grpo_core.errors import ModelNotFound
from grpo_core.tree.optim import OptimizerName
from grpo_core.tree.trainer import AUTO_DEVICE, TrainerSettings
from grpo_trainer.errors import UnusableOptimizer
from grpo_trainer.model.adapter import trained_parameters, with_adapter
from grpo_trainer.model.fused_head import CHUNK_LOGITS, CHUNK_LOGITS_ON_CPU
from grpo_trainer.model.policy import (
    CausalLM,
    attention_widths,
    base_model,
    device_of,
    layers_of,
    text_config_of,
    train_only,
)
from grpo_trainer.optim.buckets import BUCKET_ELEMENTS, PART_ELEMENTS
from grpo_trainer.optim.rules import Adafactor, AdamW32, State, empty_8bit_state, is_quantised
from grpo_trainer.ranks import Ranks

log = structlog.get_logger()

DEFAULT_MODEL_LEN = 4096
MICRO_BATCHES = (32_768, 16_384, 8192, 4096)
"""Tokens of a micro-batch on a GPU, the first that fits. Of more, kernels are hardly faster."""
MARGIN = 0.25
"""What a chosen micro-batch leaves free, as a part of what a step needs for a short time: other
architectures than Llama's need so much more. On an H100, 0.5 billion weights needed 4 % to 15 %
less than planned, and compiled 23 % less, without the gaps between tensors."""
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
GAPS = 0.6
"""Estimate, on a CPU: memory that glibc keeps between freed tensors, as a part of what a step
without --gradient-checkpointing needs for a short time. Seen: 0.2 to 0.8."""
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
INITIAL_STATE: dict[OptimizerName, Callable[[Tensor], State]] = {
    "adamw": AdamW32().initial_state,
    "adamw_8bit": lambda weights: empty_8bit_state(weights, is_quantised(weights)),
    "adafactor": Adafactor().initial_state,
}
MASTER_BYTES = {"float32": 4, "bfloat16": 2}
FLOAT32_BYTES = 4
GATHERED_KEYS = 16 / 9
"""Keys per token of a micro-batch, because each completion's attention has a copy of its prompt's:
8 (P + C) of P + 8 C tokens, in groups of 8 whose prompts are as long as their completions. Longer
prompts need more, up to 8."""
FUSED_COPIES, PLAIN_COPIES = 2, 3
"""Copies of the logits in float32 beside those in the model's type: scaled by the temperature and
normalised; in the plain head also their gradient."""


@dataclass(frozen=True)
class MemoryBudget:
    """Where server and trainer compute: on one GPU, or on the CPU of this host.

    Args:
        name: of the GPU; None if one is assumed
        total_bytes: the GPU's memory, or the host's
        trainer_reserve, server_reserve: bytes that each process needs beside what the plan counts
        free_bytes: of the GPU, free or this process's own
        ranks: of the trainer; several have a GPU each, and the server has its own. On a CPU all are
            on this host
    """

    is_gpu: bool
    name: str | None
    total_bytes: int
    trainer_reserve: int
    server_reserve: int
    free_bytes: float = math.inf
    ranks: int = 1

    @classmethod
    def find(cls, device: str) -> MemoryBudget:
        """Measure the memory of the GPU or host. Args: device: the value of --device"""
        is_gpu = torch.cuda.is_available() if device == AUTO_DEVICE else device.startswith("cuda")
        if not is_gpu:
            return cls(False, None, _host_bytes(), TRAINER_ON_CPU, SERVER_ON_CPU)
        if not torch.cuda.is_available():
            return cls(True, None, ASSUMED_GPU_BYTES, TRAINER_ON_GPU, SERVER_ON_GPU)
        gpu = device if device.startswith("cuda") else "cuda"
        found = torch.cuda.get_device_properties(gpu)
        free = torch.cuda.mem_get_info(gpu)[0] + torch.cuda.memory_reserved(gpu)
        return cls(True, found.name, found.total_memory, TRAINER_ON_GPU, SERVER_ON_GPU, free)

    def of_least(self, ranks: Ranks) -> MemoryBudget:
        """Of the rank with the least memory. Called on all ranks."""
        sizes = torch.tensor([self.total_bytes, self.free_bytes], dtype=torch.float64)
        total, free = (-ranks.maximum(-sizes)).tolist()
        return replace(self, total_bytes=int(total), free_bytes=free, ranks=ranks.count)


def _host_bytes() -> int:
    """This host's memory, or what the container may use of it."""
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.exists() else ""
    return min(host, int(limit)) if limit.isdecimal() else host


@dataclass(frozen=True)
class KeptBytes:
    """`weights`: the trainer's copies of the model, unless it trains in the server's memory, and of
    the reference model."""

    weights: int
    masters: int
    gradients: int
    moments: int

    @property
    def total(self) -> int:
        return self.weights + self.masters + self.gradients + self.moments


def kept_bytes(
    settings: TrainerSettings, policy: CausalLM, optimizer: OptimizerName, parts: int = 1
) -> KeptBytes:
    """Sizes that follow from the shapes of a policy. Args: parts: into which it is divided"""
    trained = list(trained_parameters(policy).values())
    states = (INITIAL_STATE[optimizer](torch.empty_like(p, device="meta")) for p in trained)
    is_one_pass = settings.gradient_accumulation_steps == 1  # several are summed in float32
    # Without another model, the reference model is the policy without its adapter.
    is_other = settings.reference_model not in (None, settings.model)
    has_reference = settings.kl_coef > 0 and (settings.lora is None or is_other)
    copies = (settings.sync.mode != "shared_vllm") + has_reference
    return KeptBytes(
        weights=copies * sum(p.nbytes for p in policy.parameters()) // parts,
        masters=sum(p.numel() for p in trained) * MASTER_BYTES[settings.master_dtype] // parts,
        gradients=sum(p.nbytes if is_one_pass else p.numel() * FLOAT32_BYTES for p in trained)
        // parts,
        moments=sum(tensor.nbytes for state in states for tensor in state.values()) // parts,
    )


def collected_bytes(policy: CausalLM) -> int:
    """What a rank collects at most in a pass of a divided policy: the weights outside of the layers
    and of two layers, the gradients of one layer, and the float32 sums of two."""
    layers = [[*layer.parameters()] for layer in layers_of(base_model(policy)) or ()]
    sizes = [sum(p.nbytes for p in layer) for layer in layers]
    gradients = [
        sum(p.nbytes + 2 * FLOAT32_BYTES * p.numel() for p in layer if p.requires_grad)
        for layer in layers
    ]
    outside = sum(p.nbytes for p in policy.parameters()) - sum(sizes)
    return outside + 2 * max(sizes, default=0) + max(gradients, default=0)


def working_bytes(settings: TrainerSettings, policy: CausalLM, is_gpu: bool) -> tuple[int, int]:
    """Highest memory of a step beside the kept bytes, without and with --gradient-checkpointing."""
    config = text_config_of(policy)
    trained = list(trained_parameters(policy).values())
    element, hidden = next(policy.parameters()).element_size(), config.hidden_size
    # The widest layers count, if they differ.
    tokens, (queries, keys) = settings.micro_batch_tokens, max(attention_widths(config))
    sizes = getattr(config, "intermediate_size", None) or 4 * hidden
    mlp = max(sizes) if isinstance(sizes, list) else sizes
    # Each norm stores its input in float32, and its result before and after the weight. Attention
    # stores queries, keys, values and its result, without flash attention also in the order of the
    # row. The MLP stores the gate, the gate's activation, the other half, and their product.
    norms = 2 * hidden * (FLOAT32_BYTES + 2 * element)
    results = 1 if is_gpu and element < FLOAT32_BYTES else 2
    attention = (1 + results) * queries + 2 * GATHERED_KEYS * keys
    layer = int(tokens * (norms + element * (attention + 4 * mlp)))
    # Layers below the lowest trained one store nothing.
    chosen = settings.trained_layers if settings.lora is None else settings.lora.layers
    layers = config.num_hidden_layers - min(chosen or (0,))
    head = _output_bytes(settings, policy, CHUNK_LOGITS if is_gpu else CHUNK_LOGITS_ON_CPU)
    # The head's backward pass comes first; then one layer at a time is computed again.
    recomputed = layers * tokens * element * hidden + max(head, layer)
    # The update takes a part of a bucket at a time: float32 copies of it.
    weights = sum(p.numel() for p in trained)
    most = BUCKET_ELEMENTS if is_gpu else PART_ELEMENTS
    bucket = min(weights, max(most, max(p.numel() for p in trained)))
    has_wide_gradient = settings.gradient_accumulation_steps > 1 or trained[0].element_size() == 4
    copies = 1 + (settings.master_dtype != "float32") + (not has_wide_gradient)
    copies += settings.weight_decay > 0
    part = bucket if is_gpu else min(bucket, PART_ELEMENTS)
    # In a backward pass, the gradients of a bucket are also those of its parameters, and a copy.
    update = max(copies * FLOAT32_BYTES * part, 2 * trained[0].element_size() * bucket)
    return max(layers * layer + head, update), max(recomputed, update)


def _output_bytes(settings: TrainerSettings, policy: CausalLM, chunk: int) -> int:
    """Bytes that the output layer needs for the logits, and for the gradient of its weights.

    Args: chunk: logits that the fused head computes at a time
    """
    element, config = next(policy.parameters()).element_size(), text_config_of(policy)
    is_fused = settings.fused_head != "off"
    logits = settings.micro_batch_tokens * config.vocab_size
    at_once: int = min(logits, chunk) if is_fused else logits
    is_trained = bool(policy.get_output_embeddings().weight.requires_grad)
    copies = FUSED_COPIES if is_fused else PLAIN_COPIES
    per_weight = element + FLOAT32_BYTES * is_fused  # the fused head sums in float32
    gradient: int = is_trained * config.vocab_size * config.hidden_size * per_weight
    return at_once * (element + copies * FLOAT32_BYTES) + gradient


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one choice of options.

    Args:
        kv_bytes: keys and values of the longest sequence, in the server
        kept: in each rank, from step to step
        working_bytes: in each rank for a short time, without and with --gradient-checkpointing
    """

    settings: TrainerSettings
    machine: MemoryBudget
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
            if self.machine.ranks > 1:
                return 0
            return self.settings.gpu_memory_utilization * self.machine.total_bytes
        return self.least_server_bytes

    @property
    def ranks_beside(self) -> int:
        """Number of ranks that share the memory."""
        return 1 if self.machine.is_gpu else self.machine.ranks

    @property
    def collected_bytes(self) -> int:
        return collected_bytes(self.policy) if self.settings.fsdp else 0

    def trainer_bytes(self, is_recomputed: bool) -> int:
        """Highest memory of a rank. Args: is_recomputed: with --gradient-checkpointing"""
        working = self.working_bytes[is_recomputed] + self.gap_bytes + self.collected_bytes
        return self.kept.total + working + self.machine.trainer_reserve

    @property
    def fits(self) -> bool:
        """Whether server and trainer fit with the given options and `MARGIN`."""
        is_recomputed = self.settings.gradient_checkpointing
        margin = MARGIN * self.working_bytes[is_recomputed]
        needed = self.ranks_beside * (self.trainer_bytes(is_recomputed) + margin)
        return needed + self.server_bytes <= self.machine.total_bytes

    @property
    def gap_bytes(self) -> int:
        return 0 if self.machine.is_gpu else int(GAPS * self.working_bytes[False])

    def usable_utilization(self, is_recomputed: bool) -> float | None:
        """The given --gpu-memory-utilization if server and trainer fit with it; otherwise the
        largest one with which they do. None: there is none. On a CPU the option has no effect."""
        total, given = self.machine.total_bytes, self.settings.gpu_memory_utilization
        room = total - self.ranks_beside * self.trainer_bytes(is_recomputed)
        if not self.machine.is_gpu or self.machine.ranks > 1:
            least = 0 if self.machine.is_gpu else self.least_server_bytes
            return given if room >= least else None
        usable = min(given, math.floor(100 * room / total) / 100)
        return usable if usable * total >= self.least_server_bytes else None


def memory_plan(settings: TrainerSettings, ranks: int = 1) -> MemoryPlan:
    """Reads the model's configuration alone. Args: ranks: of the trainer

    Raises:
        ModelNotFound: the model has no configuration here or on the hub.
        PolicyMismatch: the model has no such layers or modules.
        UnusableOptimizer: --master-dtype does not fit the model's data type.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(settings.model).get_text_config()
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise ModelNotFound(
            f"--model {settings.model}: cannot read its config.json: {reason}"
        ) from error
    machine = replace(MemoryBudget.find(settings.device), ranks=ranks)
    dtype = _dtype(settings, config, machine)
    if settings.master_dtype == "bfloat16" != name_of(dtype):
        raise UnusableOptimizer(
            f"--master-dtype bfloat16: the weights are in {name_of(dtype)}; pass "
            "--master-dtype float32, or --dtype bfloat16"
        )
    return chosen_plan(settings, _untrained_policy(settings, dtype), machine)


def chosen_plan(
    settings: TrainerSettings, policy: CausalLM, machine: MemoryBudget, recorded: int | None = None
) -> MemoryPlan:
    """With the tokens of a micro-batch that the user chose. Otherwise, on a GPU, with the recorded
    number if it fits, or with the largest one of `MICRO_BATCHES`; if none fits, with the smallest.

    Args: recorded: of the checkpoint from which the run resumes
    """
    if settings.tokens_per_micro_batch is not None or not machine.is_gpu:
        return _plan(settings, policy, machine)
    sizes = [max(size, settings.seq_len) for size in MICRO_BATCHES]
    if recorded is not None:
        sizes = [recorded, *sizes]

    def plan(tokens: int) -> MemoryPlan:
        change = {"tokens_per_micro_batch": tokens}
        return _plan(settings.model_copy(update=change), policy, machine)

    return next((found for found in map(plan, sizes) if found.fits), None) or plan(min(sizes))


def with_micro_batch(
    settings: TrainerSettings, policy: CausalLM, ranks: Ranks, recorded: int | None
) -> TrainerSettings:
    """The settings with `chosen_plan`'s tokens of a micro-batch. Called on all ranks."""
    machine = MemoryBudget.find(str(device_of(policy))).of_least(ranks)
    if settings.tokens_per_micro_batch is not None or not machine.is_gpu or not ranks.leads:
        return settings
    plan = chosen_plan(settings, policy, machine, recorded)
    log.info(
        "micro_batch.chosen",
        tokens=plan.settings.tokens_per_micro_batch,
        **({} if recorded is None else {"checkpoint_tokens": recorded}),
        trainer_gib=_gib(plan.trainer_bytes(settings.gradient_checkpointing)),
        server_gib=_gib(plan.server_bytes),
        gpu_gib=_gib(machine.total_bytes),
        **_hint(plan),
    )
    return plan.settings


def _hint(plan: MemoryPlan) -> dict[str, str]:
    needed = plan.trainer_bytes(plan.settings.gradient_checkpointing) - plan.machine.trainer_reserve
    if not plan.fits:
        return {"hint": "this may not fit; see grpo --memory-plan"}
    if needed > (free := plan.machine.free_bytes):
        return {"hint": f"{_gib(needed)} GiB needed, {_gib(free)} free: see nvidia-smi for others"}
    return {}


def _plan(settings: TrainerSettings, policy: CausalLM, machine: MemoryBudget) -> MemoryPlan:
    config, dtype = text_config_of(policy), next(policy.parameters()).dtype
    optimizer = settings.optimizer_on("cuda" if machine.is_gpu else "cpu")
    limit = getattr(config, "max_position_embeddings", DEFAULT_MODEL_LEN)
    longest = settings.max_model_len or min(limit, DEFAULT_MODEL_LEN)
    keys = sum(width for _, width in attention_widths(config))
    return MemoryPlan(
        settings=settings,
        machine=machine,
        policy=policy,
        dtype=dtype,
        layers=int(config.num_hidden_layers),
        kv_bytes=2 * keys * dtype.itemsize * longest,
        optimizer=optimizer,
        kept=kept_bytes(settings, policy, optimizer, machine.ranks if settings.fsdp else 1),
        working_bytes=working_bytes(settings, policy, machine.is_gpu),
    )


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(settings: TrainerSettings, config: Any, machine: MemoryBudget) -> torch.dtype:
    """The data type of the served weights."""
    if settings.dtype != "auto":
        found: torch.dtype = getattr(torch, settings.dtype)
        return found
    if not machine.is_gpu and cpu.CPU.is_slow_in_bfloat16:
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


def text_of(plan: MemoryPlan) -> str:
    return "\n".join([_head(plan), _server(plan), _trainer(plan), verdict(plan)])


def _head(plan: MemoryPlan) -> str:
    machine, weights = plan.machine, sum(p.numel() for p in plan.policy.parameters())
    total = f"{_gib(machine.total_bytes)} GiB"
    found = machine.name or "no GPU found, so this size is assumed"
    place = f"GPU      {total} ({found})" if machine.is_gpu else f"memory   {total} of this host"
    return (
        f"model    {plan.settings.model}: {weights / 1e9:.3g} billion weights, {plan.layers} "
        f"layers, {name_of(plan.dtype)}\n{place}, for {_users(plan)}"
    )


def _users(plan: MemoryPlan) -> str:
    if (ranks := plan.machine.ranks) == 1:
        return "trainer and server"
    return "each rank" if plan.machine.is_gpu else f"{ranks} ranks and the server"


def _server(plan: MemoryPlan) -> str:
    least = f"{_gib(plan.least_server_bytes)} GiB"
    on_others = plan.machine.is_gpu and plan.machine.ranks > 1
    share = (
        f"{least} or more, on another GPU"
        if on_others
        else f"{_gib(plan.server_bytes)} GiB by --gpu-memory-utilization "
        f"{plan.settings.gpu_memory_utilization:g}; it needs {least} or more"
        if plan.machine.is_gpu
        else f"{least} or more"
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
        **({"whole weights of some layers": plan.collected_bytes} if settings.fsdp else {}),
        **({"gaps between freed buffers (estimated)": plan.gap_bytes} if plan.gap_bytes else {}),
        rest: plan.machine.trainer_reserve,
    }
    each = "" if plan.machine.ranks == 1 else f" for each of {plan.machine.ranks} ranks"
    return (
        f"trainer  {_gib(plan.trainer_bytes(is_recomputed))} GiB{each} in mode "
        f"{settings.sync.mode}, which trains {trained / 1e9:.3g} billion weights\n"
    ) + _lines(parts)


def _lines(parts: Mapping[str, int]) -> str:
    return "".join(f"         {_gib(size):>5}  {name}\n" for name, size in parts.items())


def verdict(plan: MemoryPlan) -> str:
    """Whether they fit, if necessary with --gradient-checkpointing or less for the server."""
    settings, total = plan.settings, _gib(plan.machine.total_bytes)
    is_recomputed = settings.gradient_checkpointing
    needed = _gib(plan.ranks_beside * plan.trainer_bytes(is_recomputed))
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
