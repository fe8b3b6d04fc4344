"""Maps the server's weight memory into this process, and builds a policy of views into it."""

from __future__ import annotations

import contextlib
import mmap
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from grpo_core.weights.shared_memory import (
    CudaMemory,
    CudaPlace,
    CudaSegment,
    TensorRegion,
    WeightManifest,
    pid_namespace,
    shm_filesystem,
    torch_build,
)
from grpo_core.weights.socket import WeightConnection
from grpo_trainer.errors import (
    MovedParameters,
    PolicyMismatch,
    ServedWeightsDiffer,
    UnreachableWeights,
)
from grpo_trainer.model.loading import TrainedWeights
from grpo_trainer.model.policy import CausalLM
from grpo_trainer.optim.master_optimizer import MasterOptimizer


@dataclass(frozen=True)
class MappedWeights:
    """The server's weight memory as tensors. `bytes_of` returns [nbytes] uint8 that shares the
    memory."""

    manifest: WeightManifest
    device: torch.device
    bytes_of: Callable[[TensorRegion], Tensor] = field(repr=False)

    def view(self, region: TensorRegion) -> Tensor:
        raw = self.bytes_of(region)
        return raw.view(getattr(torch, region.dtype)).view(region.shape)

    def address(self, region: TensorRegion) -> int:
        return self.bytes_of(region).data_ptr()

    def wait_until_written(self) -> None:
        """Wait until the server can read every write of this process."""
        if self.device.type == "cuda":  # a CPU's writes are visible at once
            torch.cuda.synchronize(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' data type. Raises `PolicyMismatch` if they have several."""
        names = sorted({region.dtype for region in self.manifest.parameters.values()})
        if len(names) != 1:
            raise PolicyMismatch(
                f"the server's parameters have several data types, {names}; start it with one "
                "--dtype"
            )
        dtype: torch.dtype = getattr(torch, names[0])
        return dtype

    @property
    def dtype_name(self) -> str:
        """The name without the prefix, such as "float32" or "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")


def map_weights(connection: WeightConnection) -> MappedWeights:
    """Raises `UnreachableWeights` if the weights are on a GPU that this process cannot share."""
    memory, manifest = connection.grant.memory, connection.grant.manifest
    if isinstance(memory, CudaMemory):
        return map_cuda(manifest, memory, OwnPlace.find())
    # The mapping stays valid after the descriptor is closed.
    mapping = mmap.mmap(connection.fd, manifest.total_bytes, mmap.MAP_SHARED)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    return MappedWeights(manifest, whole.device, lambda r: whole[r.offset : r.end])


@dataclass(frozen=True)
class OwnPlace:
    """The GPUs and namespaces of this process. `devices`: index of each visible GPU, by UUID."""

    devices: Mapping[str, int]
    torch: str
    pid_namespace: int
    shm_filesystem: int

    @classmethod
    def find(cls) -> OwnPlace:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]
        return cls(
            devices={uuid: index for index, uuid in enumerate(uuids)},
            torch=torch_build(torch.__version__, torch.version.cuda),
            pid_namespace=pid_namespace(),
            shm_filesystem=shm_filesystem(),
        )

    def obstacles(self, server: CudaPlace) -> list[str]:
        """Reasons why this process cannot share the server's memory; [] if there is none."""
        problems = []
        if server.device_uuid not in self.devices:
            seen = ", ".join(self.devices) or "none"
            problems.append(
                f"the weights are on {server.device_name} {server.device_uuid}; this process sees "
                f"{seen}: give both the same GPU (CUDA_VISIBLE_DEVICES, or the container's devices)"
            )
        if server.torch != self.torch:
            problems.append(
                f"the server runs torch {server.torch}, this process {self.torch}: install the same"
            )
        if server.pid_namespace != self.pid_namespace:
            problems.append(
                "server and trainer are in different PID namespaces, but CUDA finds the "
                "exporting process by its PID: start one container in the PID namespace of the "
                "other container (pid: service:...)"
            )
        if server.shm_filesystem != self.shm_filesystem:
            problems.append(
                "server and trainer have different /dev/shm, where torch counts users of "
                "exported memory: let one container use the /dev/shm of the other container "
                "(ipc: service:...), which needs ipc: shareable"
            )
        return problems


def map_cuda(manifest: WeightManifest, memory: CudaMemory, own: OwnPlace) -> MappedWeights:
    """Map every segment of a GPU's memory. Args: own: where this process runs

    Raises:
        UnreachableWeights: lists every obstacle, or gives CUDA's error.
    """
    problems, cause = own.obstacles(memory.place), None
    storages: list[torch.UntypedStorage] = []
    index = own.devices.get(memory.place.device_uuid, 0)
    if not problems:
        try:
            storages = [_opened(segment, index) for segment in memory.segments]
        except RuntimeError as error:  # raised by torch and CUDA
            problems, cause = [f"CUDA cannot open the server's memory: {error}"], error
    if problems:
        raise UnreachableWeights(
            "the server's weights cannot be shared with this trainer:\n  " + "\n  ".join(problems)
        ) from cause
    device = torch.device("cuda", index)
    starts = [segment.start for segment in memory.segments]  # offsets in the server

    def bytes_of(region: TensorRegion) -> Tensor:
        number = bisect_right(starts, region.offset) - 1
        raw = torch.empty(0, dtype=torch.uint8, device=device)
        return raw.set_(storages[number], region.offset - starts[number], (region.nbytes,), (1,))

    return MappedWeights(manifest, device, bytes_of)


def _opened(segment: CudaSegment, device_index: int) -> torch.UntypedStorage:
    """Open one segment. `device_index` counts this process's GPUs; the server may count
    differently."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(
        device_index,
        bytes.fromhex(segment.handle),
        segment.nbytes,
        segment.handle_offset,
        bytes.fromhex(segment.ref_counter),
        segment.ref_counter_offset,
        bytes.fromhex(segment.event),
        segment.event_sync_required,
    )
    return storage


def build_policy(model_name: str, weights: MappedWeights) -> CausalLM:
    """The model of `model_name`'s configuration, built from views; nothing is copied.

    Raises:
        PolicyMismatch: names, shapes or dtypes differ from the server's; lists all of them.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(model_name)
    # Parameters are created on the meta device, because they become views below. Buffers are
    # created for real: they hold computed values, such as rotary frequencies, that no model file
    # contains.
    with init_empty_weights(include_buffers=False):
        policy: Any = AutoModelForCausalLM.from_config(config, dtype=weights.dtype)
    with contextlib.suppress(OSError):  # it may name further end tokens; some models have none
        policy.generation_config = GenerationConfig.from_pretrained(model_name)
    policy.tie_weights()  # creating parameters on the meta device untied them
    parameters = dict(policy.named_parameters())
    _check_fit(model_name, parameters, weights.manifest)
    for name, parameter in parameters.items():
        view = weights.view(weights.manifest.parameters[name])
        owner, _, leaf = name.rpartition(".")
        policy.get_submodule(owner).register_parameter(leaf, nn.Parameter(view))
        del parameter
    policy.tie_weights()
    # `policy.to()` would also move the views.
    for module in policy.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(weights.device))
    check_views(policy, weights)
    built: CausalLM = policy
    return built


def move_views(policy: CausalLM, weights: MappedWeights) -> None:
    """Point every parameter of the policy to new memory, and keep the values found there.

    The parameters stay the same objects, so their gradient hooks stay too.

    Raises:
        PolicyMismatch: the memory does not hold this model.
    """
    parameters = dict(policy.named_parameters())
    _check_fit(policy.__class__.__name__, parameters, weights.manifest)
    for name, parameter in parameters.items():
        parameter.data = weights.view(weights.manifest.parameters[name])
    check_views(policy, weights)


def release_views(policy: CausalLM) -> None:
    """Replace the parameters' memory with placeholders until `move_views`, so that the memory of an
    ended server can be freed."""
    for parameter in policy.parameters():
        parameter.data = parameter.new_empty(1).expand(parameter.shape)


def check_views(policy: CausalLM, weights: MappedWeights) -> None:
    """Check that every parameter is still in the memory that the server reads.

    Raises:
        MovedParameters: lists every parameter that is not.
    """
    moved = [
        name
        for name, parameter in policy.named_parameters()
        if parameter.data_ptr() != weights.address(weights.manifest.parameters[name])
    ]
    if moved:
        raise MovedParameters(
            f"{len(moved)} parameters are no longer in the server's memory: {', '.join(moved)}; "
            "remove the code that called .to() or share_memory_(), or replaced .data"
        )


def _check_fit(
    model_name: str, parameters: Mapping[str, nn.Parameter], manifest: WeightManifest
) -> None:
    regions = manifest.parameters
    used = {regions[name].offset for name in parameters if name in regions}
    problems = [
        f"{name}: the server has no such parameter" for name in parameters if name not in regions
    ]
    problems += [
        f"{name}: served shape {list(regions[name].shape)}, policy shape {list(parameter.shape)}"
        for name, parameter in parameters.items()
        if name in regions and tuple(parameter.shape) != regions[name].shape
    ]
    # Model files may name one tensor twice (tied embeddings); both names then have one offset.
    problems += [
        f"{name}: the server has this parameter, but the policy does not"
        for name, region in regions.items()
        if name not in parameters and region.offset not in used
    ]
    if problems:
        raise PolicyMismatch(
            f"the policy of {model_name} does not fit the served {manifest.model}:\n  "
            + "\n  ".join(problems)
            + "\nload the same model on both sides"
        )


@torch.no_grad()
def load_masters(policy: CausalLM, weights: TrainedWeights, optimizer: MasterOptimizer) -> None:
    """Replace the master weights by those of a model's files.

    Raises:
        ServedWeightsDiffer: layers that are not trained differ from the files.
    """
    files = dict(weights.load(next(policy.parameters()).dtype).named_parameters())
    views = dict(policy.named_parameters())
    frozen = [name for name, p in views.items() if not p.requires_grad]
    if any(not torch.equal(views[name].cpu(), files[name]) for name in frozen):
        raise ServedWeightsDiffer(
            "the server holds an earlier run's weights in layers that this run does not train "
            "(grpo.train_layer_indices); restart the server, so that it loads its model again"
        )
    trained = [name for name, p in views.items() if p.requires_grad]
    for name, master in zip(trained, optimizer.masters, strict=True):
        master.copy_(files[name])
