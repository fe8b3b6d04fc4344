"""Unusual families, each as a small model with random weights, take a step: images, an encoder's
attention, and layers other than attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from grpo_trainer.config.forward import ForwardOptions
from grpo_trainer.gradients import accumulate_gradients
from grpo_trainer.model.adapter import trained_parameters, with_adapter
from grpo_trainer.model.forward import build_forward_pass
from grpo_trainer.model.logprobs import PROBE_LENGTH, logprobs_of, sampled_tokens
from grpo_trainer.model.policy import end_tokens_of, vocabulary_of
from grpo_trainer.objectives import GRPO
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.optim.schedule import constant
from tests.unit.trainer.forward_rig import VOCABULARY, ragged_batch
from tests.unit.trainer.tiny_policy import LORA

SIZES = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "intermediate_size"), 32),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2),
    **{"num_hidden_layers": 4, "max_position_embeddings": 64, "head_dim": 16, "pad_token_id": 0},
}
VISION = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
}


def small_model(family: str) -> Any:
    kind = CONFIG_MAPPING[family]
    default = kind()
    text, vision = (getattr(default, f"{name}_config", None) for name in ("text", "vision"))
    if vision is None:
        config = kind(**_known(default, SIZES))
    else:
        config = kind(
            text_config=type(text)(**_known(text, SIZES)).to_dict(),
            vision_config=_known(vision, VISION),
        )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def _known(config: Any, sizes: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if hasattr(config, name)}


@pytest.mark.parametrize("family", ["gemma3", "modernbert-decoder", "qwen3_5_text"])
@pytest.mark.filterwarnings("ignore")
def test_a_family_takes_a_step(family: str) -> None:
    require_step(small_model(family))


@pytest.mark.filterwarnings("ignore")
def test_a_language_model_that_is_nested_in_one_that_takes_images_trains_an_adapter() -> None:
    policy = with_adapter(small_model("gemma3"), LORA).eval()
    assert vocabulary_of(policy) == VOCABULARY
    assert end_tokens_of(policy)
    assert len(logprobs_of(policy, sampled_tokens(policy))) == PROBE_LENGTH - 1
    require_step(policy)


def require_step(policy: Any) -> None:
    forward = build_forward_pass(policy, ForwardOptions())
    parameters = trained_parameters(policy)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    optimizer = MasterOptimizer(parameters.values(), constant(1e-3), 0.0, 1.0)
    accumulate_gradients(policy, ragged_batch(forward.layout.cut, 1000), GRPO, 0, forward)
    assert optimizer.step(0) > 0
    optimizer.write_into_parameters()
    assert any(not torch.equal(before[name], p) for name, p in parameters.items())
