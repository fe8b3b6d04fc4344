"""What keeps a trainer from writing the served weights in place, and what each refusal advises."""

from __future__ import annotations

import re
from typing import Any

import pytest

from grpo_vllm.shareable_layout import LayoutFacts, why_not_shareable

ONE_WORKER = {"tensor_parallel_size": 1, "data_parallel_size": 1}
OBSTACLES: dict[str, tuple[Any, str]] = {
    "quantization": ("fp8", "quantised weights (fp8)"),
    "latent_attention": (True, "(MLA)"),
    "experts": (64, "mixture of experts (64)"),
    "draft": ("eagle3", "speculative decoding (eagle3)"),
    "expert_parallel": (True, "--enable-expert-parallel"),
    "sleep_mode": (True, "--enable-sleep-mode"),
    "cumem_allocator": (True, "--enable-cumem-allocator"),
    "uva_offload_gb": (2.5, "--cpu-offload-gb 2.5"),
    "prefetch_offload_groups": (4, "--offload-group-size 4"),
    "special_layers": ({f"mlp.{i}": "Packed" for i in range(5)}, "mlp.2: Packed, and 2 more"),
    "parallel_sizes": (
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 4},
        "several workers (--tensor-parallel-size 2, --data-parallel-size 4)",
    ),
}
ADVICE = re.compile("drop|use --weight-bridge-mode lora_only|serve a smaller model")
EXPLAINED_BY_ANOTHER = {"cumem_allocator", "special_layers"}
"""By sleep mode, and by quantization or experts: one thing to drop, not two."""


def test_a_dense_model_on_one_worker_can_be_shared() -> None:
    assert why_not_shareable(LayoutFacts(parallel_sizes=ONE_WORKER)) == []


@pytest.mark.parametrize("fact", OBSTACLES)
def test_each_obstacle_is_named_with_what_to_do(fact: str) -> None:
    value, what = OBSTACLES[fact]
    (line,) = why_not_shareable(LayoutFacts(**{fact: value}))
    assert what in line
    assert ADVICE.search(line)


def test_all_of_them_are_listed_at_once_but_each_cause_only_once() -> None:
    facts: dict[str, Any] = {fact: value for fact, (value, _) in OBSTACLES.items()}
    lines = why_not_shareable(LayoutFacts(**facts))
    assert len(lines) == len(OBSTACLES) - len(EXPLAINED_BY_ANOTHER)
    for fact, (_, what) in OBSTACLES.items():
        assert any(what in line for line in lines) == (fact not in EXPLAINED_BY_ANOTHER)
