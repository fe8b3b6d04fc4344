"""Writes tensors as a safetensors file, a bounded part at a time, and hashes what it writes.

    8 bytes length of the header (little endian), header (JSON), the tensors' bytes without gaps

safetensors itself brings all tensors of a file to the host before it writes the first: of a trainer
state on a GPU 12 bytes per weight.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

PART_BYTES = 64 << 20
"""Brought to the host at a time."""
_ALIGNMENT = 8
_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
}


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> str:
    """Returns the file's SHA-256 in hexadecimal.

    Args:
        tensors: on any device, of a floating type or uint8
    Raises:
        OSError: the disk is full, or the like.
    """
    # The widest elements first: each tensor then begins at a multiple of its element's size.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in _parts(ordered):
            digest.update(part)
            file.write(part)
    return digest.hexdigest()


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    described, begin = {}, 0
    for name, tensor in tensors.items():
        end = begin + tensor.nbytes
        described[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    yield _header(tensors)
    for tensor in tensors.values():
        for part in torch.split(tensor.detach().reshape(-1).view(torch.uint8), PART_BYTES):
            yield part.cpu().numpy().data
