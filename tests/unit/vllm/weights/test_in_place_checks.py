"""Obstacles that prevent a trainer from writing the served weights in place."""

from __future__ import annotations

from typing import Any

from grpo_vllm.weights.in_place_checks import LayoutFacts, why_not_shareable

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
    "special_layers": ({f"mlp.{i}": "Packed" for i in range(5)}, "mlp.2: Packed, and 2 more"),
    "parallel_sizes": (
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 4},
        "several workers (--tensor-parallel-size 2, --data-parallel-size 4)",
    ),
}
EXPLAINED_BY_ANOTHER = {"cumem_allocator", "special_layers"}
"""Sleep mode implies one fact and quantization or experts another: each gives one line, not two."""


def test_a_dense_model_on_one_worker_can_be_shared() -> None:
    assert why_not_shareable(LayoutFacts(parallel_sizes=ONE_WORKER)) == []


def test_all_of_them_are_listed_at_once_but_each_cause_only_once() -> None:
    facts: dict[str, Any] = {fact: value for fact, (value, _) in OBSTACLES.items()}
    lines = why_not_shareable(LayoutFacts(**facts))
    assert len(lines) == len(OBSTACLES) - len(EXPLAINED_BY_ANOTHER)
    for fact, (_, what) in OBSTACLES.items():
        assert any(what in line for line in lines) == (fact not in EXPLAINED_BY_ANOTHER)
