"""A trained model is written in the data type of its base, and keeps small updates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from grpo_runs.sft.saving import save_like
from grpo_tiny_model.model import build_tokenizer

UPDATE = 2**-12
"""Relative: a sixteenth of the distance of two bfloat16 numbers or less."""


@pytest.fixture(params=["bfloat16", "float32"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, request.param))
    model.save_pretrained(tmp_path / "base")
    build_tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_updates_below_the_precision_of_the_base_are_kept_in_the_mean(
    base: Path, tmp_path: Path
) -> None:
    policy = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = {name: weights.detach().clone() for name, weights in policy.named_parameters()}
    frozen = "lm_head.weight"
    with torch.no_grad():
        for name, weights in policy.named_parameters():
            weights *= 1.0 if name == frozen else 1 + UPDATE
    save_like(str(base), policy, tmp_path / "saved", seed=0)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert saved.dtype == AutoConfig.from_pretrained(base).dtype
    changes = {name: (w.float() / before[name] - 1) for name, w in saved.named_parameters()}
    assert not changes.pop(frozen).any()
    change = torch.cat([one.flatten() for one in changes.values()]).detach().nanmean()
    assert float(change) == pytest.approx(UPDATE, rel=0.1)
    template = AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template
    assert template == AutoTokenizer.from_pretrained(base).chat_template
