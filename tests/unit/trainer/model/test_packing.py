"""Attention over packed sequences: how models with it are saved, and how it calls flash kernels.

`test_forward.py` compares its results with those of padded rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from grpo_trainer.model import packing
from grpo_trainer.model.forward import FastForward, plain_forward
from grpo_trainer.model.packing import Flash, packed
from tests.unit.trainer.forward_rig import WINDOW, outcome, qwen, ragged, require_equal


def test_it_is_not_saved_with_the_model(tmp_path: Path) -> None:
    policy = qwen()
    packing.enable(policy)
    policy.save_pretrained(tmp_path)
    assert packing.NAME not in (tmp_path / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation == packing.DEFAULT


def varlen_attn(
    query: Tensor,  # [N, A, D]; key and value may have fewer heads if `enable_gqa`
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    bounds_k: Tensor,
    longest: int,
    longest_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],  # positions that count on the left and on the right; -1: all
    enable_gqa: bool = False,
) -> Tensor:
    """Torch's flash attention as documented; the real kernels need a GPU."""
    assert bounds is bounds_k
    assert bounds.dtype == torch.int32
    assert longest == longest_k == int(bounds.diff().max())
    parts = []
    for start, end in bounds.unfold(0, 2, 1).tolist():
        q, k, v = (t[start:end].transpose(0, 1) for t in (query, key, value))  # [A, n, D]
        everything = torch.ones(end - start, end - start, dtype=torch.bool)
        left = end if window_size[0] < 0 else window_size[0]
        seen = everything.triu(-left).tril(window_size[1])
        found = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa
        )
        parts.append(found.transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("changes", "takes_fewer_heads"),
    [({}, True), (WINDOW, False)],
    ids=["all, torch 2.13", "window, torch 2.11"],
)
def test_flash_attention_gets_bounds_windows_and_heads_that_give_the_same_numbers(
    changes: dict[str, Any], takes_fewer_heads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, micro = qwen(**changes), ragged()
    expected = outcome(policy, plain_forward, micro)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr(Flash, "on", lambda _: Flash(takes_fewer_heads))
    monkeypatch.setattr(Flash, "computes", lambda *_: True)
    packing.enable(policy)
    require_equal(outcome(policy, FastForward(layout=packed), micro), expected)
