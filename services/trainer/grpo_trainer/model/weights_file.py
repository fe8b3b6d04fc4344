"""The file of a model's weights as a stream, so that nobody holds a second copy of the model.

The names are those of the model's own files: transformers' reverse conversion is applied to one
tensor at a time, if the model was not divided from fewer tensors.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from grpo_trainer.model.division import model_tensors, whole_tensors
from grpo_trainer.model.policy import CausalLM

WEIGHTS = "model.safetensors"
_TYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}
"""Names of data types in the header of a safetensors file."""


def weights_file(policy: CausalLM) -> tuple[int, Iterator[Tensor]]:
    """Bytes of the file, and its content in pieces: [N] uint8, where the weights are."""
    end, fields = 0, dict[str, Any](__metadata__={"format": "pt"})
    shapes = (
        (name, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
        for name, tensor in model_tensors(policy).items()
    )
    for name, tensor in _as_saved(shapes, policy):
        begin, end = end, end + tensor.nbytes
        place = {"shape": list(tensor.shape), "data_offsets": [begin, end]}
        fields[name] = {"dtype": _TYPES[tensor.dtype], **place}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    return len(header) + end, _pieces(header, policy)


def _pieces(header: bytes, policy: CausalLM) -> Iterator[Tensor]:
    yield torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for _, tensor in _as_saved(whole_tensors(policy), policy):
        yield tensor.reshape(-1).contiguous().view(torch.uint8)


def _as_saved(
    tensors: Iterable[tuple[str, Tensor]], policy: CausalLM
) -> Iterator[tuple[str, Tensor]]:
    """In the order of the file."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    conversions = getattr(policy, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(policy, add_legacy=False)
    if any(len(conversion.target_patterns) > 1 for conversion in conversions):
        yield from revert_weight_conversion(policy, dict(tensors)).items()
        return
    for name, tensor in tensors:
        yield from revert_weight_conversion(policy, {name: tensor}).items()
