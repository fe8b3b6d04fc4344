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
    after a step. Checkpoints hold whole tensors, so they do not depend on the number of ranks.

    Every rank calls `step`, `write_into_parameters`, `tensors` and `load_tensors`.

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
        """Whole tensors, in host memory if the policy is sharded. Then the ranks above 0 keep none
        of them: together they are as large as the state of all ranks."""
        if self._sharded is None:
            return super().tensors(names)
        found: dict[str, Tensor] = {}
        for path, part in super().tensors(names).items():
            with self._ranks.exchange("collecting the optimizer's state"):
                whole = self._sharded.collected(name_of(path), part)
            if self._ranks.leads:
                found[path] = whole.cpu()
        return found

    @torch.no_grad()
    def load_tensors(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        """Load one parameter at a time, so that no rank holds a second state.

        Args: tensors: whole ones on the leader; not read on other ranks
        """
        counts = Counter(map(name_of, tensors))  # one tensor: the master weights alone
        stepped = torch.tensor([int(counts[name] > 1) for name in names])
        has_state = self._ranks.from_leader(stepped, "a checkpoint").tolist()
        for index, name in enumerate(names):
            master = self.masters[index]
            shape = master.shape if self._sharded is None else self._sharded.shapes[name]
            whole = torch.empty(shape, dtype=master.dtype, device=master.device)
            kinds = self._kinds(whole) if has_state[index] else {MASTER: whole}
            own: dict[str, Tensor] = {}
            for kind, place in kinds.items():
                if self._ranks.leads:
                    place.copy_(tensors[f"{kind}/{name}"])
                sent = self._ranks.from_leader(place, "a checkpoint")
                own[kind] = sent if self._sharded is None else self._sharded.own(sent)
            self._load_one(index, own)


def name_of(path: str) -> str:
    """The parameter's name in the path of one of its tensors, `kind/name`."""
    return path.partition("/")[2]
