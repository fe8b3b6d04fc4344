"""The tensors of a checkpoint, in one safetensors file for each rank that has a part of them.

The files are those of `torch.distributed.checkpoint` in its format for Hugging Face, so it reads
them with any number of ranks; a single file of whole tensors is the simplest case. They are written
without it, because its writer would hold a part three times, and send pickles between the ranks.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from grpo_trainer.atomic_files import write_tensors
from grpo_trainer.optim.buckets import own_part

TENSORS = "tensors.safetensors"
READ_BYTES = 64 << 20
"""Read at a time, or all tensors of a parameter."""
Place = Callable[[str, torch.Size, torch.dtype], Tensor]
"""A new tensor for the one of a path, shape and type: a DTensor if this rank reads its rows only.
"""


def part_name(index: int, count: int) -> str:
    """The file of a rank."""
    return TENSORS if count == 1 else f"tensors-{index + 1:05}-of-{count:05}.safetensors"


@dataclass(frozen=True)
class StatePart:
    """A rank's part of a checkpoint in host memory. Args: places: of each tensor in the whole"""

    tensors: Mapping[str, Tensor]
    places: Mapping[str, object]

    @classmethod
    def copied(cls, tensors: Mapping[str, Tensor], *, leads: bool) -> StatePart:
        """Args: tensors: DTensors, and tensors that all ranks have, which rank 0 saves"""
        found, places = dict[str, Tensor](), dict[str, object]()
        for path, tensor in tensors.items():
            own, offsets = own_part(tensor.detach()), [0] * tensor.dim()
            if isinstance(tensor, DTensor):
                (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
                offsets = [*chunk.offsets]
            if own.numel() and (leads or isinstance(tensor, DTensor)):
                found[path] = own.to("cpu", copy=True)
                places[path] = {"saved_offsets": offsets}
        return cls(found, places)

    def write(self, path: Path) -> str:
        """Write the part to disk; returns the file's SHA-256 in hexadecimal. Raises `OSError`."""
        return write_tensors(self.tensors, path, {"DCP_SHARDING_INFO": json.dumps(self.places)})


class SavedTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint by path. Those of some parameters are read when one is looked up.

    Args: place: where a tensor is read to; names: of the parameters, in the order of look-ups

    Raises:
        SafetensorError, OSError, KeyError, ValueError: a file cannot be read.
    """

    def __init__(self, directory: Path, place: Place, names: Sequence[str]) -> None:
        self._reader, self._place = HuggingFaceStorageReader(str(directory)), place
        heads = self._reader.read_metadata()  # once, not for each tensor
        self._reader.read_metadata = lambda: heads  # type: ignore[method-assign]
        self._facts = heads.state_dict_metadata
        self._names = iter(names)
        self._paths = {name: list[str]() for name in names}
        for path in self._facts:
            self._paths.setdefault(path.partition("/")[2], []).append(path)
        self._read: dict[str, Tensor] = {}

    def __getitem__(self, path: str) -> Tensor:
        if path not in self._read:  # some parameters at once, because each call takes milliseconds
            for name in self._names:
                self._read |= {one: self._new(one) for one in self._paths[name]}
                if sum(own_part(tensor).nbytes for tensor in self._read.values()) >= READ_BYTES:
                    break
            own = {one: tensor for one, tensor in self._read.items() if own_part(tensor).numel()}
            with warnings.catch_warnings():  # that no process group is used
                warnings.simplefilter("ignore", UserWarning)
                load(own, storage_reader=self._reader, no_dist=True)
        return self._read.pop(path)

    def _new(self, path: str) -> Tensor:
        facts = self._facts[path]
        assert isinstance(facts, TensorStorageMetadata)
        return self._place(path, facts.size, facts.properties.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._facts)

    def __len__(self) -> int:
        return len(self._facts)
