"""Families of transformers, each as a small model with random weights, take a step.

The configurations are made by the names of their sizes. `OTHERS` lists the families of which such a
model cannot be made, or which transformers itself cannot compute at these sizes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from grpo_core.tree.objectives import GRPO
from grpo_core.tree.trainer import ForwardOptions
from grpo_trainer.learner import accumulate_gradients
from grpo_trainer.model.adapter import trained_parameters, with_adapter
from grpo_trainer.model.forward import build_forward_pass
from grpo_trainer.model.logprobs import PROBE_LENGTH, logprobs_of, sampled_tokens
from grpo_trainer.model.policy import end_tokens_of, vocabulary_of
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.telemetry.speed import ModelFlops
from tests.unit.trainer.forward_rig import VOCABULARY, ragged_batch
from tests.unit.trainer.tiny_policy import LORA

WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size", "d_model", "n_embd", "d_ff")
SIZES = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys((*WIDTHS, "ffn_dim", "shared_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_local_experts", "num_experts"), 4),
    **dict.fromkeys(("n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_layer", "n_head"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
VISION = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "embed_dim"), 16),
    **dict.fromkeys(("num_hidden_layers", "depth"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads"), 2),
    **{"image_size": 28, "patch_size": 14, "out_hidden_size": 32},
}
OWN_HEAD_SIZE = (
    *("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),  # differs by layer
    *("axk1", "deepseek_v3", "youtu", "falcon"),  # follows from other sizes
)
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16}
_HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": _MAMBA,
    "plbart": _HEADS,
    "whisper": _HEADS,
}
IN_MAKE_TEST = ("gemma3", "modernbert-decoder", "qwen3_5_text")
OTHERS = {
    *("blt", "codegen", "cohere_compass_text", "dbrx", "dots1", "gemma3n"),
    *("gemma3n_text", "gemma4_assistant", "gemma4_unified_assistant", "git"),
    *("lfm2_moe", "longcat_flash", "mamba2", "mimo_v2_flash", "musicgen"),
    *("musicgen_melody", "phi4_multimodal", "prophetnet", "qwen4_exp"),
    *("qwen4_exp_text", "reformer", "xlnet", "xlstm", "xmod", "zamba", "zamba2"),
    "zaya",
}
FAMILIES = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - OTHERS)


def small_model(family: str) -> Any:
    kind = CONFIG_MAPPING[family]
    default = kind()
    text, vision = (getattr(default, f"{name}_config", None) for name in ("text", "vision"))
    sizes = {k: v for k, v in SIZES.items() if not (k == "head_dim" and family in OWN_HEAD_SIZE)}
    sizes |= OWN_SIZES.get(family, {})
    if hasattr(text, "to_dict"):
        config = kind(
            text_config=type(text)(**_known(text, sizes)).to_dict(),
            **({"vision_config": _known(vision, VISION)} if hasattr(vision, "to_dict") else {}),
        )
    else:
        config = kind(**_known(default, sizes))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) < 3e7, "its sizes have other names"
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def _known(config: Any, sizes: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if hasattr(config, name)}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in IN_MAKE_TEST else pytest.mark.full)
        for name in FAMILIES
    ],
)
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
    optimizer = MasterOptimizer(parameters.values(), lambda _: 1e-3, 0.0, 1.0)
    accumulate_gradients(policy, ragged_batch(forward.layout.cut, 1000), GRPO, 0, forward)
    assert optimizer.step(0) > 0
    optimizer.write_into_parameters()
    assert any(not torch.equal(before[name], p) for name, p in parameters.items())
    assert ModelFlops.of(policy).of_token > 0
