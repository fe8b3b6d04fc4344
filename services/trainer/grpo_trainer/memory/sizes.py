"""The memory of the machine, and the bytes that the trainer needs, from the parameters' shapes.

Kept from step to step, and exact: weights, master weights, the optimizer's moments, and between the
first backward pass and the update the gradients.

Needed for a short time, and estimated: activations, logits and buffers. The activations are those
of a layer of Llama or Qwen2: two norms, attention with rotary positions, and a gated MLP. Other
architectures differ by up to a quarter.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_trainer.config.optimizer import OptimizerName
from grpo_trainer.config.trainer import AUTO_DEVICE
from grpo_trainer.model.adapter import trained_parameters
from grpo_trainer.model.fused_head import CHUNK_LOGITS
from grpo_trainer.model.policy import CausalLM
from grpo_trainer.optim.rules import Adafactor, AdamW32, State, empty_8bit_state

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
INITIAL_STATE: dict[OptimizerName, Callable[[Tensor], State]] = {
    "adamw": AdamW32().initial_state,
    "adamw_8bit": empty_8bit_state,
    "adafactor": Adafactor().initial_state,
}
MASTER_BYTES = {"float32": 4, "bfloat16": 2}
FLOAT32_BYTES = 4
FUSED_COPIES, PLAIN_COPIES = 2, 3
"""Copies of the logits in float32 beside those in the model's type: scaled by the temperature and
normalised; in the plain head also their gradient."""


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
    policy: CausalLM,
    optimizer: OptimizerName,
    master_dtype: str,
    micro_batches: int,
    copies: int,
) -> KeptBytes:
    """Args:
    policy: on the meta device
    micro_batches: of a step; the gradients of several are summed in float32
    copies: of the model, in the trainer's memory
    """
    trained = list(trained_parameters(policy).values())
    states = (INITIAL_STATE[optimizer](p.detach()) for p in trained)
    return KeptBytes(
        weights=copies * sum(p.nbytes for p in policy.parameters()),
        masters=sum(p.numel() for p in trained) * MASTER_BYTES[master_dtype],
        gradients=sum(
            p.numel() * (p.element_size() if micro_batches == 1 else FLOAT32_BYTES) for p in trained
        ),
        moments=sum(tensor.nbytes for state in states for tensor in state.values()),
    )


@dataclass(frozen=True)
class LayerSizes:
    """`queries`, `keys`: widths of all heads together. `element`: bytes of an activation."""

    hidden: int
    queries: int
    keys: int
    mlp: int
    vocabulary: int
    element: int

    @classmethod
    def of(cls, config: Any, element: int) -> LayerSizes:
        """Args: config: transformers' configuration of the text model."""
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        return cls(
            hidden=config.hidden_size,
            queries=heads * width,
            keys=key_heads * width,
            mlp=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            vocabulary=config.vocab_size,
            element=element,
        )

    @property
    def activations(self) -> int:
        """Bytes per token that the backward pass of one layer needs."""
        # Each norm stores its input in float32, and its result before and after the weight.
        # Attention stores queries, keys, values and its result. The MLP stores the gate, the gate's
        # activation, the other half, and their product.
        norms = 2 * self.hidden * (FLOAT32_BYTES + 2 * self.element)
        return norms + self.element * (2 * self.queries + 2 * self.keys + 4 * self.mlp)

    @property
    def layer_input(self) -> int:
        """Bytes per token that are stored of a layer that is computed again."""
        return self.element * self.hidden

    def head(self, tokens: int, is_fused: bool, is_trained: bool) -> int:
        """Bytes that the output layer needs for the logits, and for the gradient of its weights."""
        logits = tokens * self.vocabulary
        at_once = min(logits, CHUNK_LOGITS) if is_fused else logits
        weights = self.vocabulary * self.hidden if is_trained else 0
        copies = FUSED_COPIES if is_fused else PLAIN_COPIES
        per_weight = self.element + FLOAT32_BYTES * is_fused  # the fused head sums in float32
        return at_once * (self.element + copies * FLOAT32_BYTES) + weights * per_weight


def pass_bytes(
    sizes: LayerSizes,
    tokens: int,
    layers: int,
    is_recomputed: bool,
    is_fused: bool,
    trains_head: bool,
) -> int:
    """Highest memory of a forward and backward pass beside the kept bytes.

    Args:
        tokens: of a micro-batch
        layers: number of layers from the lowest trained one to the last; the others store nothing
        is_recomputed: with --gradient-checkpointing
        is_fused: with --fused-head
    """
    head = sizes.head(tokens, is_fused, trains_head)
    if not is_recomputed:
        return tokens * layers * sizes.activations + head
    # The head's backward pass comes first; then one layer at a time is computed again.
    return tokens * layers * sizes.layer_input + max(head, tokens * sizes.activations)


def update_bytes(
    trained: Sequence[Tensor], master_dtype: str, is_summed: bool, decays: bool
) -> int:
    """Buffers of the update, which takes one parameter at a time: float32 copies of the largest.

    Args:
        is_summed: the gradients are sums, which are in float32
        decays: with weight decay
    """
    has_wide_gradient = is_summed or trained[0].dtype == torch.float32
    copies = 1 + (master_dtype != "float32") + (not has_wide_gradient) + decays
    return copies * FLOAT32_BYTES * max(p.numel() for p in trained)
