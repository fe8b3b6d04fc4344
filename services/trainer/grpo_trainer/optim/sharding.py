"""Several ranks: the optimizer of each, and a policy that PyTorch's FSDP2 divides among them.

Each parameter is divided by rows. A pass collects the rows of one layer at a time and adds up the
gradients. The leader also keeps the whole policy, in the weights' data type: from it come checks,
exports and publications.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

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
from grpo_trainer.model.forward import ForwardPass
from grpo_trainer.model.logprobs import TokenValues
from grpo_trainer.model.policy import CausalLM, device_of, layers_of
from grpo_trainer.optim.buckets import MASTER
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.ranks import Ranks


@dataclass(frozen=True)
class Sharded:
    """Args:
    policy: this rank's part
    whole: the leader's whole policy; None on other ranks
    shapes: of the whole trained parameters
    """

    policy: CausalLM
    whole: CausalLM | None
    ranks: Ranks
    mesh: DeviceMesh
    shapes: Mapping[str, torch.Size]

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

    def divided(self, part: Tensor, shape: torch.Size) -> DTensor:
        """The rows of this rank as part of a whole. Args: shape: of the whole"""
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(part, self.mesh, [Shard(0)], shape=shape, stride=stride)

    def own(self, whole: Tensor) -> Tensor:
        """This rank's rows of a tensor."""
        parts = whole.chunk(self.ranks.count)
        return parts[self.ranks.index] if self.ranks.index < len(parts) else whole[:0]


def shard(policy: CausalLM, ranks: Ranks) -> Sharded:
    """Divide the policy. All ranks call it with equal weights.

    Raises:
        FastPathRefused: the model has no list of layers.
    """
    whole = policy if ranks.leads else None
    part = copy.deepcopy(policy) if ranks.leads else policy
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


def is_divided(policy: CausalLM) -> bool:
    """Whether a policy is one rank's part."""
    return isinstance(policy, FSDPModule)


class RankOptimizer(MasterOptimizer):
    """The optimizer of one of several ranks. All ranks take the same steps, so no weights are sent
    after a step.

    Every rank calls `step`, `write_into_parameters` and `load_tensors`.

    Args:
        sharded: None if each rank holds the whole policy
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        ranks: Ranks,
        sharded: Sharded | None,
        **options: Any,
    ) -> None:
        super().__init__(parameters, total=None if sharded is None else ranks.total, **options)
        self._ranks, self._sharded = ranks, sharded

    @property
    def parts(self) -> int:
        return 1 if self._sharded is None else self._ranks.count

    def write_into_parameters(self, may_write: Callable[[], None] = lambda: None) -> None:
        if self._sharded is None:
            super().write_into_parameters(may_write)
        else:
            super().write_into_parameters()
            may_write()
            with self._ranks.exchange("collecting the weights"):
                self._sharded.write_into_whole()

    def tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        found = super().tensors(names)
        if self._sharded is None:
            return found
        for name, shape in self._sharded.shapes.items():
            for kind, whole in self._kinds(torch.empty(shape, device="meta")).items():
                path = f"{kind}/{name}"
                if path in found and _has_rows(whole.shape, shape):
                    found[path] = self._sharded.divided(found[path], whole.shape)
        return found

    def place(self, path: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if self._sharded is None or not _has_rows(shape, self._sharded.shapes[name_of(path)]):
            return super().place(path, shape, dtype)
        own = self._sharded.own(torch.empty(shape, dtype=dtype, device="meta"))
        return self._sharded.divided(torch.empty_like(own, device="cpu"), shape)

    @torch.no_grad()
    def load_tensors(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        """Args: tensors: only rank 0 has them, if each rank holds the whole policy"""
        if self._sharded is not None:
            super().load_tensors(names, tensors)
            return
        counts = Counter(map(name_of, tensors))  # one tensor: the master weights alone
        stepped = torch.tensor([int(counts[name] > 1) for name in names])
        has_state = self._ranks.from_leader(stepped, "a checkpoint").tolist()
        for index, name in enumerate(names):
            whole = torch.empty_like(self.masters[index])
            own = self._kinds(whole) if has_state[index] else {MASTER: whole}
            for kind, place in own.items():
                if self._ranks.leads:
                    place.copy_(tensors[f"{kind}/{name}"])
                self._ranks.from_leader(place, "a checkpoint")
            self._load_one(index, own)


def _has_rows(shape: torch.Size, of_parameter: torch.Size) -> bool:
    """Whether a tensor of the state is divided as its parameter is."""
    return shape[:1] == of_parameter[:1]


def name_of(path: str) -> str:
    """The parameter's name in the path of one of its tensors, `kind/name`."""
    return path.partition("/")[2]
