"""What can be said of an export without a GPU. With one: tests/gpu."""

from __future__ import annotations

from grpo_vllm.cuda_export import in_expandable_segments

SNAPSHOT = [
    {"address": 1000, "total_size": 500, "is_expandable": True},
    {"address": 2000, "total_size": 500, "is_expandable": False},
    {"address": 3000, "total_size": 500},
]


def test_parameters_in_expandable_segments_are_counted() -> None:
    assert in_expandable_segments([1000, 1499, 1500, 2000, 3499], SNAPSHOT) == 2


def test_none_where_the_allocator_was_not_told_to() -> None:
    assert in_expandable_segments([2000, 3000], SNAPSHOT) == 0
