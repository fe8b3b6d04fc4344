"""Memory on a GPU that another process cannot open is refused, with what to do."""

from __future__ import annotations

import pytest
import torch

from grpo_vllm.weights.cuda_ipc import NATIVE, why_not_exportable
from grpo_vllm.weights.memory import WeightMemory


@pytest.mark.parametrize(
    ("backend", "is_expandable", "told"),
    [
        (NATIVE, False, None),
        (NATIVE, True, "1 of 1 parameters are in expandable segments"),
        ("cudaMallocAsync", False, "torch's allocator cudaMallocAsync; start the server without"),
    ],
)
def test_memory_that_cannot_be_exported_is_named(
    backend: str, is_expandable: bool, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.zeros(8)
    segment = {"address": weight.data_ptr(), "total_size": 32, "is_expandable": is_expandable}
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [segment])
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: backend)
    found = why_not_exportable(WeightMemory([weight]))
    assert found is None if told is None else told in str(found)
