"""Models of random weights in the shape of real ones: no download, and as fast or as slow.

What they say is noise, which costs what sense costs: every matrix product, cache and transfer has
the size of the real model's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.gpu_bench.shapes import SHAPES, ModelShape, ShapeName
from grpo_tiny_model.model import build_tokenizer

if TYPE_CHECKING:
    from transformers import Qwen2Config

STANDARD_DEVIATION = 0.02
"""Of every matrix, as transformers initialises them."""
MAX_POSITIONS = 32_768
SHARD_BYTES = 2 * 2**30
"""Of one file, unless a single tensor has more. It is what lies in host memory at a time."""
_INDEX = "model.safetensors.index.json"
_METADATA = {"format": "pt"}


def make_random_model(shape: ShapeName, directory: Path, dtype: torch.dtype) -> Path:
    """Write a checkpoint with its tokenizer into `directory`, and return that.

    Weights are drawn on the GPU where there is one, with one seed: two calls on one kind of device
    write the same. A directory that holds a whole checkpoint already is left as it is.
    """
    if (directory / "config.json").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    config = model_config(SHAPES[shape], dtype)
    build_tokenizer().save_pretrained(directory)
    _write_shards(_random_tensors(config, dtype), directory)
    config.save_pretrained(directory)  # last: it says that the rest is there
    return directory


def model_config(shape: ModelShape, dtype: torch.dtype) -> Qwen2Config:
    from transformers import Qwen2Config

    specials = len(build_tokenizer())
    return Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        dtype=dtype,
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=shape.tied,
        pad_token_id=specials - 3,
        bos_token_id=specials - 2,
        eos_token_id=specials - 1,
    )


def random_policy(shape: ShapeName, dtype: torch.dtype, device: torch.device) -> Any:
    """The same kind of model, made in memory of its own: nothing is read or written."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        policy = AutoModelForCausalLM.from_config(model_config(SHAPES[shape], dtype), dtype=dtype)
    return policy.eval()


def _random_tensors(config: Qwen2Config, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """One after the other: the whole model is never in memory."""
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, parameter in model.named_parameters():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        tensor = torch.empty(parameter.shape, dtype=dtype, device=device)
        if name.endswith("norm.weight"):
            yield name, tensor.fill_(1.0)
        else:
            yield name, tensor.normal_(0.0, STANDARD_DEVIATION, generator=generator)


def _write_shards(tensors: Iterable[tuple[str, Tensor]], directory: Path) -> None:
    from safetensors.torch import save_file

    places: dict[str, str] = {}
    total_bytes = 0
    for number, shard in enumerate(_shards(tensors), start=1):
        file = f"model-{number:05d}.safetensors"
        save_file(shard, directory / file, metadata=_METADATA)
        places |= dict.fromkeys(shard, file)
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": places}
    (directory / _INDEX).write_text(json.dumps(index, indent=1))


def _shards(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    shard_bytes = 0
    for name, tensor in tensors:
        if shard and shard_bytes + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, shard_bytes = {}, 0
        shard[name] = tensor
        shard_bytes += tensor.nbytes
    if shard:
        yield shard
