"""Attention over packed sequences: how models with it are saved, and how it calls flash kernels.

`test_forward.py` compares its results with those of padded rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from grpo_trainer.model import packed_attention
from grpo_trainer.model.forward import FastForward, plain_forward
from grpo_trainer.model.packed_attention import Flash, GatheredKeys
from grpo_trainer.model.packing import PACKED
from tests.unit.trainer.forward_rig import WINDOW, outcome, qwen, ragged, require_equal


def test_it_is_not_saved_with_the_model(tmp_path: Path) -> None:
    policy = qwen()
    packed_attention.enable(policy)
    policy.save_pretrained(tmp_path)
    assert packed_attention.NAME not in (tmp_path / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation == packed_attention.DEFAULT


def varlen_attn(
    query: Tensor,  # [N, A, D]
    key: Tensor,  # [keys of all sequences, A, D]; fewer heads if `enable_gqa`
    value: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    longest_own: int,
    longest: int,
    *,
    scale: float,
    window_size: tuple[int, int],  # positions that count on the left and on the right; -1: all
    enable_gqa: bool = False,
) -> Tensor:
    """Torch's flash attention as documented; the real kernels need a GPU. A sequence's queries are
    its last tokens."""
    assert query_bounds.dtype == key_bounds.dtype == torch.int32
    assert longest_own == int(query_bounds.diff().max())
    assert longest == int(key_bounds.diff().max())
    assert len(key) == len(value) == key_bounds[-1]
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    parts = []
    bounds = zip(query_bounds.unfold(0, 2, 1), key_bounds.unfold(0, 2, 1), strict=True)
    for queries, keys in bounds:
        q = query[slice(*queries)].transpose(0, 1)  # [A, n, D]
        k, v = (t[slice(*keys)].transpose(0, 1) for t in (key, value))
        everything = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        offset = k.shape[1] - q.shape[1]
        left = k.shape[1] if window_size[0] < 0 else window_size[0]
        seen = everything.triu(offset - left).tril(offset + window_size[1])
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
    packed_attention.enable(policy)
    require_equal(outcome(policy, FastForward(layout=PACKED), micro), expected)
    alone = replace(micro, shared=(0,) * len(micro.shared))
    assert PACKED.inputs(alone).arguments["bounds"].key_places is None
    require_equal(outcome(policy, FastForward(layout=PACKED), alone), expected)


PLACES = PACKED.inputs(ragged()).arguments["bounds"].key_places


def gathered(keys: Tensor) -> Tensor:
    return GatheredKeys.apply(keys, *PLACES)  # type: ignore[no-any-return, no-untyped-call]


def selected(keys: Tensor) -> Tensor:
    return keys.index_select(0, PLACES.row)


def gradient(gather: Callable[[Tensor], Tensor], upstream: Tensor) -> Tensor:
    keys = torch.zeros(len(PLACES.edges) - 1, 2, 3, dtype=upstream.dtype, requires_grad=True)
    return torch.autograd.grad(gather(keys), keys, upstream)[0]


def upstream() -> Tensor:
    drawn = torch.Generator().manual_seed(0)
    return torch.randn(len(PLACES.row), 2, 3, dtype=torch.float64, generator=drawn)


def test_gradients_of_shared_keys_are_added_up_one_after_the_other_in_float32() -> None:
    assert int(PLACES.edges.diff().max()) > 3  # sequences that share a token
    assert torch.equal(gradient(gathered, upstream()), gradient(selected, upstream()))
    ones = torch.ones(upstream().shape, dtype=torch.bfloat16)
    ones[:6] = 256  # to which bfloat16 can add no 1
    assert torch.equal(gradient(gathered, ones).float(), gradient(selected, ones.float()))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_shared_keys_are_gathered_in_compiled_code() -> None:
    compiled = torch.compile(gathered, backend="aot_eager", fullgraph=True, dynamic=True)
    assert torch.equal(gradient(compiled, upstream()), gradient(selected, upstream()))


def test_layers_share_the_mask_of_common_beginnings() -> None:
    """Kept by each layer for its backward pass, it takes as much memory as long activations."""
    policy, micro = qwen(num_hidden_layers=3), ragged()
    packed_attention.enable(policy)
    arguments = PACKED.inputs(micro).arguments
    shapes = {
        mask.shape
        for mask in arguments["attention_calls"].masks(None, torch.float32)
        if mask is not None
    }
    kept: set[int] = set()

    def keep(tensor: Tensor) -> Tensor:
        if tensor.shape in shapes:
            kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.get_decoder()(**arguments)
    assert len(kept) == len(shapes) > 0
