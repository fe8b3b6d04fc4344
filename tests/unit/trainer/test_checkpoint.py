from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_trainer.checkpoint import FINAL_MODEL, save_model
from grpo_trainer.tiny_model import Recipe, build_model, build_tokenizer


def test_views_into_one_memory_are_saved_as_ordinary_tensors(tmp_path: Path) -> None:
    """What the trainer holds in shared_vllm: every parameter a view into one storage."""
    source, saved = tmp_path / "source", tmp_path / "saved" / FINAL_MODEL
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    model = build_model(len(tokenizer), Recipe(layers=1, width=32))
    model.save_pretrained(source)
    tokenizer.save_pretrained(source)
    parameters = list(model.parameters())
    memory = torch.cat([p.detach().flatten() for p in parameters])
    offset = 0
    for parameter in parameters:
        parameter.data = memory[offset : offset + parameter.numel()].view(parameter.shape)
        offset += parameter.numel()

    for _ in range(2):  # the second replaces the first
        save_model(model, str(source), saved)
    loaded = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
    size = (saved / "model.safetensors").stat().st_size
    assert size < 1.1 * memory.nbytes + 10_000
    assert AutoTokenizer.from_pretrained(saved).chat_template == tokenizer.chat_template
    assert [path.name for path in saved.parent.iterdir()] == ["final_model"]
