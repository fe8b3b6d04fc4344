"""A policy that PyTorch's FSDP2 divides among the ranks.

Each parameter is divided by rows. A pass collects the rows of one layer at a time, and a backward
pass adds up the gradients. So every pass needs all ranks. If rank 0 makes one alone, the others
follow its order: with a single token, they collect the same layers in the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
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
from grpo_trainer.model.policy import CausalLM, base_model, device_of, layers_of, middle
from grpo_trainer.ranks import Orders, Ranks

T = TypeVar("T")
CHUNK_ELEMENTS = 1 << 24
"""Elements that are summed at a time: the sum may need a copy in 64 bits."""
BASE_ELEMENTS = 4096
_INTEGERS = {2: torch.int16, 4: torch.int32}


class Division:
    """Divides a model in place.

    Args:
        policy: rank 0's, in host memory or on `device`; on the other ranks on the meta device
        orders: of rank 0
        name: of the model, in orders

    Attributes:
        shapes: of the whole trained parameters

    Raises:
        FastPathRefused: the model has no list of layers.
    """

    def __init__(self, policy: CausalLM, device: torch.device, orders: Orders, name: str) -> None:
        model: Any = base_model(policy)
        layers = layers_of(model)
        if layers is None:
            raise FastPathRefused(
                f"--fsdp: {type(model).__name__} has no list of layers; omit --fsdp"
            )
        self.policy, self.ranks, self._orders = policy, orders.ranks, orders
        self._pass, self._tensor = f"pass of {name}", f"tensor of {name}"
        self.shapes = {name: p.shape for name, p in trained_parameters(policy).items()}
        self.mesh = init_device_mesh(device.type, (self.ranks.count,))
        for module in (*layers, model):
            _receive(module, device, self.ranks)
            _shard(module, self.mesh)
        if policy is not model:  # peft calls the model's forward alone, without FSDP2's hooks
            policy.base_model.forward = model.__call__  # type: ignore[attr-defined]
        model.division, self._model = self, model
        orders.actions[self._pass] = self._follow_pass
        orders.actions[self._tensor] = lambda index: _whole([*self.tensors().values()][index])
        model.register_forward_pre_hook(lambda *_: self._orders.give(self._pass), prepend=True)
        # FSDP2 collects the weights outside the layers (embeddings, norm, head) for methods, not
        # for a decoder or head that is called alone.
        model.pass_of = lambda call: call()
        register_fsdp_forward_method(model, "pass_of")

    def run(self, call: Callable[[], T]) -> T:
        """Run `call`, which calls the decoder and uses weights outside the layers."""
        self._orders.give(self._pass)
        found: T = self._model.pass_of(call)
        return found

    def tensors(self) -> dict[str, Tensor]:
        return model_tensors(self.policy)

    def whole(self, index: int, tensor: Tensor) -> Tensor:
        """Args: index: of the tensor among all"""
        self._orders.give(self._tensor, index)
        return _whole(tensor)

    def divided(self, part: Tensor, shape: torch.Size) -> DTensor:
        """The rows of this rank as part of a whole. Args: shape: of the whole"""
        return _divided(part, shape, self.mesh)

    def own(self, whole: Tensor) -> Tensor:
        """This rank's rows of a tensor."""
        return rows_of(whole, self.mesh)

    @torch.no_grad()
    def _follow_pass(self, _: int) -> None:
        token = torch.zeros(1, 1, dtype=torch.long, device=device_of(self.policy))
        self._model(input_ids=token, use_cache=False)


def _receive(module: nn.Module, device: torch.device, ranks: Ranks) -> None:
    """Replace weights and buffers that are not divided yet by those of rank 0, on `device`."""
    owners = defaultdict[Tensor, list[tuple[nn.Module, str]]](list)
    for owner in module.modules():
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None and not isinstance(tensor, DTensor):
                owners[tensor].append((owner, name))
    for tensor, places in owners.items():
        own = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach()
        received = ranks.from_leader(own.to(device), "the weights")
        if isinstance(tensor, nn.Parameter):
            received = nn.Parameter(received, requires_grad=tensor.requires_grad)
        for owner, name in places:
            setattr(owner, name, received)


def _shard(module: nn.Module, mesh: DeviceMesh) -> None:
    precision = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    divided = fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    assert isinstance(divided, FSDPModule)
    # Sums, not averages: gloo has no averages, and the batch's weights are those of all ranks.
    divided.set_gradient_divide_factor(1.0)
    divided.set_force_sum_reduction_for_comms(True)


def division_of(policy: CausalLM) -> Division | None:
    """None if each rank has the whole policy."""
    return getattr(base_model(policy), "division", None)


def model_tensors(policy: CausalLM) -> dict[str, Tensor]:
    """The tensors of a saved model by name: parameters, each once, and persistent buffers, for
    example the correction of a router."""
    saved = policy.state_dict()
    buffers = {name: buffer for name, buffer in policy.named_buffers() if name in saved}
    return dict(policy.named_parameters()) | buffers


def whole_tensors(
    policy: CausalLM, names: Container[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `model_tensors`, without gradient, on the policy's device; if the policy is
    divided, a copy of one at a time. Rank 0 calls it, alone.

    Args: names: of the wanted tensors; None: all
    """
    division = division_of(policy)
    for index, (name, tensor) in enumerate(model_tensors(policy).items()):
        if names is None or name in names:
            yield name, tensor.detach() if division is None else division.whole(index, tensor)


@torch.no_grad()
def frozen_checksum(policy: CausalLM, is_sample: bool = False) -> int:
    """A checksum of all frozen parameters; 0 if there are none. It depends on their bits and on
    their order.

    Args:
        is_sample: of a few elements of each, rounded to bfloat16: enough to recognise another model
            below an adapter, in any data type
    """
    frozen = {name for name, p in policy.named_parameters() if not p.requires_grad}
    whole = (tensor for _, tensor in whole_tensors(policy, frozen))
    read = (middle(t, BASE_ELEMENTS).to(torch.bfloat16) if is_sample else t for t in whole)
    return sum(place * _sum_of_bits(tensor) for place, tensor in enumerate(read, 1))


def _sum_of_bits(tensor: Tensor) -> int:
    integers = _INTEGERS[tensor.element_size()]
    parts = torch.split(tensor.reshape(-1).view(integers), CHUNK_ELEMENTS)
    return sum(int(part.sum(dtype=torch.int64)) for part in parts)


def collected(part: Tensor, parameter: DTensor) -> Tensor:
    """The whole of what is divided as a parameter is. All ranks call it."""
    return _divided(part, parameter.shape, parameter.device_mesh).full_tensor()


def rows_of(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's rows. The last ranks may have none."""
    parts, rank = whole.chunk(mesh.size()), mesh.get_local_rank()
    return parts[rank] if rank < len(parts) else whole[:0]


def _divided(part: Tensor, shape: torch.Size, mesh: DeviceMesh) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, mesh, [Shard(0)], shape=shape, stride=stride)


@torch.no_grad()
def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
