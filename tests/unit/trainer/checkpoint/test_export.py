"""An exported model holds everything that the model's own files would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from grpo_core.tree.weights import LoraOptions
from grpo_trainer.model.loading import TrainedWeights
from grpo_trainer.weight_sync.shared_memory import build_policy
from tests.unit.trainer.served_memory import served
from tests.unit.trainer.tiny_policy import model_directory

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 4, **EXPERTS},
    "mixtral": {"num_local_experts": 4},
    "glm4_moe": {**ROUTED, **EXPERTS},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reloaded_export_computes_the_same(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | FAMILIES[family])
    policy = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, buffer in policy.named_buffers():
        if "correction" in name or "statics" in name:
            buffer.copy_(torch.randn_like(buffer))
    policy.save_pretrained(tmp_path / "model")
    weights = TrainedWeights(str(tmp_path / "model"))
    weights.write(policy, tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    tokens = torch.randint(97, (1, 12))
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, policy(tokens).logits)


@pytest.mark.parametrize(
    "changes",
    [
        {"do_sample": False, "temperature": 0.9, "top_p": 0.6},
        {"temperature": 0.0, "do_sample": True},
        {},
        None,
    ],
)
def test_the_generation_configuration_is_the_models(
    changes: dict[str, Any] | None, tmp_path: Path
) -> None:
    """transformers reads some files that it refuses to save. None: the model has no such file."""
    source = model_directory(tmp_path / "source")
    file = source / "generation_config.json"
    if changes is None:
        file.unlink()
    else:
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    policy = AutoModelForCausalLM.from_pretrained(source)
    own = policy.generation_config
    TrainedWeights(str(source)).write(policy, tmp_path / "saved")
    if changes is not None:
        assert (tmp_path / "saved" / file.name).read_bytes() == file.read_bytes()
    assert policy.generation_config is own
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved") is not None


def test_views_into_one_memory_are_saved_as_ordinary_tensors_once_each(tmp_path: Path) -> None:
    source, saved = model_directory(tmp_path / "source"), tmp_path / "saved"
    policy = build_policy(str(source), served(source))
    TrainedWeights(str(source)).write(policy, saved, with_tokenizer=True)
    loaded = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    for name, parameter in policy.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
    memory = sum(parameter.nbytes for parameter in policy.parameters())
    assert (saved / "model.safetensors").stat().st_size < 1.1 * memory + 10_000
    assert AutoTokenizer.from_pretrained(saved).chat_template is not None


@pytest.mark.parametrize("lora", [None, LoraOptions(2, 4, 0.0, ("q_proj",), None)])
def test_every_file_of_an_export_has_the_mode_that_the_umask_gives(
    lora: LoraOptions | None, tmp_path: Path
) -> None:
    source, saved = model_directory(tmp_path / "source"), tmp_path / "saved"
    weights = TrainedWeights(str(source), lora)
    policy = weights.load(torch.float32)
    weights.write(policy, saved, with_tokenizer=True)
    (saved / "made-by-the-test").touch()
    assert len({path.stat().st_mode for path in saved.iterdir()}) == 1
