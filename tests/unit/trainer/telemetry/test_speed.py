"""The operations of a step, counted by hand, and the rate of the device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from grpo_core.tree.weights import LoraOptions
from grpo_trainer.data.collate import Batch
from grpo_trainer.model.adapter import with_adapter
from grpo_trainer.model.policy import train_only
from grpo_trainer.ranks import Ranks
from grpo_trainer.telemetry.speed import ModelFlops, Speed
from tests.unit.trainer.groups import collated, group

LAYER = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 20
"""Weights: of the queries, keys and values, the attention's output, and the MLP."""
HEAD = 8 * 50


def qwen2(**changes: Any) -> Any:
    sizes = {"vocab_size": 50, "hidden_size": 8, "intermediate_size": 20, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    with torch.device("meta"):
        return Qwen2ForCausalLM(Qwen2Config(**sizes | heads | changes))


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_weight_needs_6_and_a_lookup_nothing(is_tied: bool) -> None:
    found = ModelFlops.of(qwen2(tie_word_embeddings=is_tied))
    assert found == ModelFlops(6 * 3 * LAYER, 6 * HEAD, 12 * 3 * 8)


def test_below_the_lowest_trained_layer_nothing_is_differentiated() -> None:
    """Layer 0 computes forward, layer 1 both gradients, layer 2 and the head one of them."""
    policy = qwen2()
    train_only(policy, (1,))
    found = ModelFlops.of(policy)
    assert found == ModelFlops((2 + 6 + 4) * LAYER, 4 * HEAD, (4 + 12 + 12) * 8)


def test_an_adapter_needs_6_and_its_base_4() -> None:
    """In layers 1 and 2, at the queries (8 → 8) and the values (8 → 4)."""
    lora = LoraOptions(
        r=2, alpha=4, dropout=0.0, target_modules=("q_proj", "v_proj"), layers=(1, 2)
    )
    found = ModelFlops.of(with_adapter(qwen2(), lora))
    adapter = 2 * (8 + 8) + 2 * (8 + 4)
    of_token = 2 * LAYER + 2 * (4 * LAYER + 6 * adapter)
    assert found == ModelFlops(of_token, 4 * HEAD, (4 + 12 + 12) * 8)


def test_a_token_passes_some_experts() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 50, "hidden_size": 8, "intermediate_size": 20, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    experts = {"num_local_experts": 5, "num_experts_per_tok": 2}
    with torch.device("meta"):
        found = ModelFlops.of(MixtralForCausalLM(MixtralConfig(**sizes | heads | experts)))
    attention, router = LAYER - 3 * 8 * 20, 8 * 5
    assert found.of_token == pytest.approx(6 * (attention + router + 2 * 3 * 8 * 20))


def test_a_shared_prompt_counts_once_and_padding_never() -> None:
    """The inputs 5 6, and 5 6 8 9: 2 tokens, and 2 after those 2."""
    (micro,) = collated(group()).micro_batches
    assert micro.shared == (0, 2)
    apart = replace(micro, shared=(0, 0))
    tokens, targets, views = ModelFlops(1, 0, 0), ModelFlops(0, 1, 0), ModelFlops(0, 0, 1)
    kinds = (tokens, targets, views)
    assert [one.of_micro_batch(micro) for one in kinds] == [4, 4, 3 + 3 + 4]
    assert [one.of_micro_batch(apart) for one in kinds] == [6, 4, 3 + 10]


def test_a_rank_is_idle_while_another_one_computes() -> None:
    """Rounds of 4 and 6 tokens, and of 6 tokens and none: 16 of 2 x (6 + 6)."""
    (micro,) = collated(group()).micro_batches
    batch = Batch([micro, *[replace(micro, shared=(0, 0))] * 2])
    speeds = [Speed(ModelFlops(1, 0, 0), rate=1.0, ranks=ranks) for ranks in (1, 2)]
    found = [speed.metrics(batch, 1.0)["train/rank_idle_fraction"] for speed in speeds]
    assert found == [None, pytest.approx(1 - 16 / 24)]


def test_the_rate_of_all_ranks_is_measured_without_a_random_number(tiny_model: Path) -> None:
    policy: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    state = torch.get_rng_state()
    with capture_logs() as logs:
        speed = Speed.measured(policy, Ranks(count=3))
    assert torch.equal(torch.get_rng_state(), state)
    (logged,) = logs
    assert (logged["event"], logged["dtype"]) == ("device.rate", "float32")
    assert logged["cpu_threads"] == torch.get_num_threads()
    assert speed.rate == pytest.approx(3 * logged["tflops"] * 1e12, rel=0.01)
