"""Places of checkpoint tensors in the arena: recorded while loading, then found as rows of a
parameter."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from grpo_core.weights.shared_memory import TensorRegion
from grpo_vllm.weights.checkpoint_map import CheckpointMap, ServedParameters
from grpo_vllm.weights.memory import WeightMemory

ROWS, WIDTH = 6, 4
ROW_BYTES = WIDTH * 4
FUSED_AT, SCALAR_AT, HEAD_AT = 256, 512, 768


def region(offset: int, *shape: int) -> TensorRegion:
    nbytes = 4 * torch.Size(shape).numel()
    return TensorRegion(offset=offset, nbytes=nbytes, shape=shape, dtype="float32")


def rows(start: int, stop: int, offset: int = FUSED_AT) -> TensorRegion:
    return region(offset + start * ROW_BYTES, stop - start, WIDTH)


@pytest.fixture(scope="module")
def arena() -> Iterator[WeightMemory]:
    arena = WeightMemory.arena(1024)
    yield arena
    assert arena.fd is not None
    os.close(arena.fd)


def load(
    arena: WeightMemory,
    targets: dict[str, list[TensorRegion]],
    permute: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
) -> CheckpointMap:
    """Load random checkpoint tensors, split by rows over the targets with their name."""
    checkpoint_map = CheckpointMap(arena)
    pieces = {name: [arena.view(at) for at in regions] for name, regions in targets.items()}
    weights = [(name, torch.rand(sum(map(len, views)), WIDTH)) for name, views in pieces.items()]
    with checkpoint_map:
        for name, weight in checkpoint_map.watch(iter(weights)):
            parts = permute(weight).split([len(view) for view in pieces[name]])
            for view, part in zip(pieces[name], parts, strict=True):
                view.copy_(part)
    return checkpoint_map


def test_parts_of_a_fused_tensor_get_a_region_each_and_adjacent_pieces_one(
    arena: WeightMemory,
) -> None:
    """The loader splits tensors that are fused on disk and copies the pieces side by side."""
    parts = {"q": rows(0, 4), "k": rows(4, 5), "v": rows(5, 6)}
    assert load(arena, {name: [at] for name, at in parts.items()}).regions() == parts
    assert load(arena, {"gate_up": [rows(0, 3), rows(3, 6)]}).regions() == {"gate_up": rows(0, 6)}


@pytest.mark.parametrize(
    ("places", "permute"),
    [
        pytest.param([rows(3, 6), rows(0, 3)], torch.clone, id="in reverse"),
        pytest.param([rows(0, 2), rows(4, 6)], torch.clone, id="with a gap"),
        pytest.param([rows(0, 4)], lambda tensor: tensor.flip(0), id="permuted"),
    ],
)
def test_a_tensor_that_a_view_would_get_wrong_is_named_and_not_shared(
    arena: WeightMemory, places: list[TensorRegion], permute: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Without this error a trainer would write rows that are not served."""
    seen = load(arena, {"torn": places}, permute)
    assert seen.regions() == {}
    assert list(seen.unshareable()) == ["torn"]


def fused(arena: WeightMemory) -> nn.Module:
    """A model with six fused rows, a scalar and a head of six rows."""
    model = nn.Module()
    model.qkv = nn.Parameter(arena.view(rows(0, ROWS)).copy_(torch.arange(24.0).view(6, WIDTH)))
    model.scale = nn.Parameter(arena.view(region(SCALAR_AT)))
    model.head = nn.Parameter(arena.view(rows(0, ROWS, HEAD_AT)))
    return model


@given(start=st.integers(0, ROWS - 1), count=st.integers(1, ROWS))
def test_rows_of_a_parameter_are_cut_where_the_mapping_says(
    arena: WeightMemory, start: int, count: int
) -> None:
    stop, model = min(start + count, ROWS), fused(arena)
    found = ServedParameters(model, arena).mapping(rows(start, stop))
    assert found is not None
    assert found.vllm_name == "qkv"
    assert found.slice == (None if stop - start == ROWS else (start, stop))
    cut = model.qkv if found.slice is None else model.qkv[slice(*found.slice)]
    assert torch.equal(cut, arena.view(rows(start, stop)))


@pytest.mark.parametrize(
    "elsewhere",
    [
        pytest.param(region(FUSED_AT + 8, 4), id="from within a row"),
        pytest.param(region(FUSED_AT, 2), id="to within a row"),
        pytest.param(region(SCALAR_AT + 44, 1), id="between two parameters"),
    ],
)
def test_regions_that_are_not_whole_rows_of_one_parameter_have_no_mapping(
    arena: WeightMemory, elsewhere: TensorRegion
) -> None:
    assert ServedParameters(fused(arena), arena).mapping(elsewhere) is None


def test_a_parameter_that_is_tied_after_loading_is_followed(arena: WeightMemory) -> None:
    """An update at the parameter's old place would never be served."""
    model = fused(arena)
    served = ServedParameters(model, arena)
    loaded = (rows(0, ROWS), rows(0, ROWS, HEAD_AT), rows(1, 3, HEAD_AT))

    def offsets() -> list[int]:
        return [found.offset for at in loaded if (found := served.mapping(at)) is not None]

    assert offsets() == [at.offset for at in loaded]
    model.head = model.qkv
    assert offsets() == [FUSED_AT, FUSED_AT, FUSED_AT + ROW_BYTES]
