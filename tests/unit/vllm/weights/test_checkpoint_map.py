"""Places of checkpoint tensors, recorded from the copies into the arena."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

from grpo_core.weights.manifest import TensorRegion
from grpo_vllm.weights.checkpoint_map import CheckpointMap
from grpo_vllm.weights.memory import WeightMemory

WIDTH = 4
ROW_BYTES = WIDTH * 4


@pytest.fixture
def arena() -> Iterator[WeightMemory]:
    arena = WeightMemory.arena(4096)
    yield arena
    assert arena.fd is not None
    os.close(arena.fd)


def rows(arena: WeightMemory, start: int, count: int) -> torch.Tensor:
    """`count` rows of width 4, float32, starting at row `start` of the arena."""
    region = TensorRegion(
        offset=start * ROW_BYTES, nbytes=count * ROW_BYTES, shape=(count, WIDTH), dtype="float32"
    )
    return arena.view(region)


def load(
    arena: WeightMemory,
    targets: dict[str, list[torch.Tensor]],
    permute: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> CheckpointMap:
    """Load random checkpoint tensors, split by rows over the targets with their name."""
    checkpoint_map = CheckpointMap(arena)
    weights = [
        (name, torch.rand(sum(len(p) for p in pieces), *pieces[0].shape[1:]))
        for name, pieces in targets.items()
    ]
    with checkpoint_map:
        for name, weight in checkpoint_map.watch(iter(weights)):
            pieces = targets[name]
            parts = permute(weight).split([len(piece) for piece in pieces])
            for piece, part in zip(pieces, parts, strict=True):
                piece.copy_(part)
    return checkpoint_map


def test_parts_of_a_fused_tensor_get_a_region_each(arena: WeightMemory) -> None:
    fused = rows(arena, 0, 6)
    regions = load(arena, {"q": [fused[:4]], "k": [fused[4:5]], "v": [fused[5:]]}).regions()
    assert {n: (r.offset, r.shape) for n, r in regions.items()} == {
        "q": (0, (4, WIDTH)),
        "k": (4 * ROW_BYTES, (1, WIDTH)),
        "v": (5 * ROW_BYTES, (1, WIDTH)),
    }


def test_adjacent_pieces_of_one_checkpoint_tensor_are_merged(arena: WeightMemory) -> None:
    """The loader splits tensors that are fused on disk and copies the pieces side by side."""
    regions = load(arena, {"gate_up": [rows(arena, 2, 3), rows(arena, 5, 3)]}).regions()
    assert (regions["gate_up"].offset, regions["gate_up"].shape) == (2 * ROW_BYTES, (6, WIDTH))


@pytest.mark.parametrize(
    ("places", "permute"),
    [
        pytest.param([(5, 3), (2, 3)], torch.clone, id="in reverse"),
        pytest.param([(0, 3), (4, 3)], torch.clone, id="with a gap"),
        pytest.param([(0, 4)], lambda tensor: tensor.flip(0), id="permuted"),
    ],
)
def test_a_tensor_that_a_view_would_get_wrong_is_named_and_not_shared(
    arena: WeightMemory,
    places: list[tuple[int, int]],
    permute: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Without this error a trainer would write rows that are not served."""
    seen = load(arena, {"torn": [rows(arena, *place) for place in places]}, permute)
    assert seen.regions() == {}
    assert list(seen.unshareable()) == ["torn"]
