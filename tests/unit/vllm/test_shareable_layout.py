"""What keeps a trainer from writing the served weights in place, and what each refusal advises."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_vllm.shareable_layout import LayoutFacts, why_not_shareable

ONE_WORKER = {"tensor_parallel_size": 1, "data_parallel_size": 1}


def test_nothing_stands_against_a_dense_model_on_one_worker() -> None:
    assert why_not_shareable(LayoutFacts(parallel_sizes=ONE_WORKER)) == []


@pytest.mark.parametrize(
    ("fact", "value", "what", "advice"),
    [
        ("quantization", "fp8", "quantised weights (fp8)", "or use --weight-bridge-mode lora_only"),
        ("latent_attention", True, "(MLA)", "use --weight-bridge-mode lora_only or none"),
        ("experts", 64, "mixture of experts (64)", "use --weight-bridge-mode lora_only or none"),
        ("draft", "eagle3", "speculative decoding (eagle3)", "drop --speculative-config"),
        ("expert_parallel", True, "--enable-expert-parallel", "drop it"),
        ("sleep_mode", True, "--enable-sleep-mode", "drop it"),
        ("cumem_allocator", True, "--enable-cumem-allocator", "drop it"),
        ("uva_offload_gb", 2.5, "--cpu-offload-gb 2.5", "serve a smaller model"),
        ("prefetch_offload_groups", 4, "--offload-group-size 4", "serve a smaller model"),
        ("special_layers", {"mlp.experts": "M"}, "mlp.experts: M", "--weight-bridge-mode"),
        (
            "parallel_sizes",
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 4},
            "several workers (--tensor-parallel-size 2, --data-parallel-size 4)",
            "drop the flags, or use --weight-bridge-mode lora_only or none",
        ),
    ],
)
def test_each_obstacle_is_named_with_what_to_do(
    fact: str, value: Any, what: str, advice: str
) -> None:
    (line,) = why_not_shareable(LayoutFacts(**{fact: value}))
    assert what in line
    assert advice in line


def test_all_of_them_are_listed_at_once() -> None:
    facts = LayoutFacts(
        quantization="awq", experts=8, expert_parallel=True, sleep_mode=True, uva_offload_gb=1.0
    )
    assert len(why_not_shareable(facts)) == 5


def test_sleep_mode_explains_its_allocator() -> None:
    """vLLM turns the allocator on for sleep: that is one thing to drop, not two."""
    (line,) = why_not_shareable(LayoutFacts(sleep_mode=True, cumem_allocator=True))
    assert "--enable-cumem-allocator" not in line


@pytest.mark.parametrize("fact", [{"quantization": "fp8"}, {"experts": 8}])
def test_layers_go_without_saying_where_the_model_is_named(fact: dict[str, Any]) -> None:
    layers = {"model.layers.0.mlp.experts": "Fp8MoEMethod"}
    (line,) = why_not_shareable(LayoutFacts(special_layers=layers, **fact))
    assert "Fp8MoEMethod" not in line


def test_of_many_layers_some_are_named() -> None:
    layers = {f"layers.{i}": "Packed" for i in range(5)}
    (line,) = why_not_shareable(LayoutFacts(special_layers=layers))
    assert "layers.2: Packed, and 2 more" in line
    assert "layers.3" not in line
