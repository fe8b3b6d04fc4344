from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_trainer.checkpoint import save_model
from tests.support.directories import names
from tests.unit.trainer.tiny_policy import model_directory


def test_views_into_one_memory_are_saved_as_ordinary_tensors(tmp_path: Path) -> None:
    """In shared_vllm every parameter is a view into one storage."""
    source, saved = model_directory(tmp_path / "source"), tmp_path / "saved" / "final_model"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    parameters = list(model.parameters())
    memory = torch.cat([p.detach().flatten() for p in parameters])
    views = memory.split([p.numel() for p in parameters])
    for parameter, view in zip(parameters, views, strict=True):
        parameter.data = view.view(parameter.shape)

    for _ in range(2):  # the second replaces the first
        save_model(model, str(source), saved)
    loaded = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
    assert (saved / "model.safetensors").stat().st_size < 1.1 * memory.nbytes + 10_000
    templates = [AutoTokenizer.from_pretrained(place).chat_template for place in (source, saved)]
    assert templates[0] == templates[1] is not None
    assert names(saved.parent) == ["final_model"]
