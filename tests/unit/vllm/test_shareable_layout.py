"""What keeps a trainer from writing the served weights in place, and what each refusal advises."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_vllm.shareable_layout import LayoutFacts, why_not_shareable

ONE_WORKER = {"tensor_parallel_size": 1, "data_parallel_size": 1}
OBSTACLES: dict[str, tuple[Any, str, str]] = {
    "quantization": ("fp8", "quantised weights (fp8)", "or use --weight-bridge-mode lora_only"),
    "latent_attention": (True, "(MLA)", "use --weight-bridge-mode lora_only or none"),
    "experts": (64, "mixture of experts (64)", "use --weight-bridge-mode lora_only or none"),
    "draft": ("eagle3", "speculative decoding (eagle3)", "drop --speculative-config"),
    "expert_parallel": (True, "--enable-expert-parallel", "drop it"),
    "sleep_mode": (True, "--enable-sleep-mode", "drop it"),
    "cumem_allocator": (True, "--enable-cumem-allocator", "drop it"),
    "uva_offload_gb": (2.5, "--cpu-offload-gb 2.5", "serve a smaller model"),
    "prefetch_offload_groups": (4, "--offload-group-size 4", "serve a smaller model"),
    "special_layers": ({"mlp.experts": "M"}, "mlp.experts: M", "--weight-bridge-mode"),
    "parallel_sizes": (
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 4},
        "several workers (--tensor-parallel-size 2, --data-parallel-size 4)",
        "drop the flags, or use --weight-bridge-mode lora_only or none",
    ),
}
EXPLAINED_BY_ANOTHER = {"cumem_allocator", "special_layers"}
"""By sleep mode, and by quantization or experts: one thing to drop, not two."""


def test_a_dense_model_on_one_worker_can_be_shared() -> None:
    assert why_not_shareable(LayoutFacts(parallel_sizes=ONE_WORKER)) == []


@pytest.mark.parametrize("fact", OBSTACLES)
def test_each_obstacle_is_named_with_what_to_do(fact: str) -> None:
    value, what, advice = OBSTACLES[fact]
    (line,) = why_not_shareable(LayoutFacts(**{fact: value}))
    assert what in line
    assert advice in line


def test_all_of_them_are_listed_at_once_but_each_cause_only_once() -> None:
    lines = why_not_shareable(
        LayoutFacts(**{fact: value for fact, (value, *_) in OBSTACLES.items()})
    )
    assert len(lines) == len(OBSTACLES) - len(EXPLAINED_BY_ANOTHER)
    for fact, (_, what, _) in OBSTACLES.items():
        assert any(what in line for line in lines) == (fact not in EXPLAINED_BY_ANOTHER)


def test_of_many_layers_some_are_named() -> None:
    layers = {f"layers.{i}": "Packed" for i in range(5)}
    (line,) = why_not_shareable(LayoutFacts(special_layers=layers))
    assert "layers.2: Packed, and 2 more" in line
    assert "layers.3" not in line
