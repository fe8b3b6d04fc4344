"""Divides a policy among the ranks with PyTorch's FSDP2.

Each parameter is divided by rows. A pass collects the rows of one layer at a time and adds up the
gradients. The leader also keeps the whole policy, in the weights' data type: from it come checks,
exports and publications.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard

from grpo_trainer.errors import FastPathRefused
from grpo_trainer.model.adapter import trained_parameters
from grpo_trainer.model.forward import ForwardPass
from grpo_trainer.model.logprobs import TokenValues
from grpo_trainer.model.policy import CausalLM, device_of, layers_of
from grpo_trainer.ranks.group import LEADER, Ranks


@dataclass(frozen=True)
class Sharded:
    """Args:
    policy: this rank's part
    whole: the leader's whole policy; None on other ranks
    """

    policy: CausalLM
    whole: CausalLM | None
    ranks: Ranks
    mesh: DeviceMesh
    shapes: Mapping[str, torch.Size]

    def shape(self, name: str) -> torch.Size:
        """Of a whole trained parameter."""
        return self.shapes[name]

    def within(self, forward: ForwardPass) -> ForwardPass:
        """The same pass, as a method of the divided policy: FSDP2 collects the weights outside the
        layers (embeddings, norm, head) for its methods, not for a head that is called alone."""
        module: Any = self.policy
        module.pass_of = partial(forward, self.policy)
        register_fsdp_forward_method(module, "pass_of")
        return lambda _, micro: cast(TokenValues, module.pass_of(micro))

    @torch.no_grad()
    def write_into_whole(self) -> None:
        """Copy the parts of the trained parameters into the leader's whole policy."""
        own = {} if self.whole is None else trained_parameters(self.whole)
        for name, parameter in trained_parameters(self.policy).items():
            assert isinstance(parameter, DTensor)
            found = parameter.full_tensor()
            if own:
                own[name].copy_(found)

    def collected(self, name: str, part: Tensor) -> Tensor:
        """The whole of a tensor of the optimizer, on every rank."""
        if not part.dim():  # a counter
            return part
        shape = self.shapes[name]
        stride = torch.empty(shape, device="meta").stride()
        parts = DTensor.from_local(part, self.mesh, [Shard(0)], shape=shape, stride=stride)
        return parts.full_tensor()

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor of the optimizer."""
        if not whole.dim():
            return whole
        parts = whole.chunk(self.ranks.count)
        return parts[self.ranks.index] if self.ranks.index < len(parts) else whole[:0]


def shard(policy: CausalLM, ranks: Ranks) -> Sharded:
    """Divide the policy. All ranks call it with equal weights.

    Raises:
        FastPathRefused: the model has no list of layers.
    """
    whole = policy if ranks.index == LEADER else None
    part = copy.deepcopy(policy) if ranks.index == LEADER else policy
    shapes = {name: p.shape for name, p in trained_parameters(policy).items()}
    mesh = init_device_mesh(device_of(policy).type, (ranks.count,))
    layers = layers_of(part)
    if layers is None:
        raise FastPathRefused(f"--fsdp: {type(policy).__name__} has no list of layers; omit --fsdp")
    precision = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    modules = [
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
        for module in (*layers, part)
    ]
    for module in modules:
        assert isinstance(module, FSDPModule)
        # Sums, not averages: gloo has no averages, and the batch's weights are those of all ranks.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return Sharded(part, whole, ranks, mesh, shapes)
