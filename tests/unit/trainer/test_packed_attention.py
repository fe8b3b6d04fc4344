"""Sequences end to end: the numbers of padded rows, and nothing seen of one's neighbours."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    Llama4TextConfig,
    MambaConfig,
)

from grpo_trainer import packed_attention
from grpo_trainer.errors import FastPathRefused
from grpo_trainer.forward_pass import FastForward, plain_forward
from grpo_trainer.layout import packed, padded
from grpo_trainer.packed_attention import Flash
from grpo_trainer.policy import token_logprobs
from tests.unit.trainer.flash_on_cpu import CALLS, Call, flash_on_cpu
from tests.unit.trainer.forward_rig import LENGTHS, outcome, qwen, ragged, require_equal

WINDOW = {
    "use_sliding_window": True,
    "sliding_window": 3,
    "layer_types": ["sliding_attention", "full_attention"],
}
MODELS = {"grouped heads": {}, "as many heads": {"num_key_value_heads": 4}, "window": WINDOW}


def test_the_layout_by_hand() -> None:
    micro = ragged()
    laid_out = packed(micro)
    inputs = laid_out.model_inputs
    sizes = [max(1, length - 1) for length in LENGTHS]
    assert list(micro.lengths) == sizes == [8, 1, 4, 1, 15, 3]
    assert inputs["position_ids"].tolist() == [[i for n in sizes for i in range(n)]]
    assert inputs["cu_seq_lens_q"].tolist() == [0, 8, 9, 13, 14, 29, 32]
    assert inputs["cu_seq_lens_q"].dtype == torch.int32
    assert inputs["max_length_q"] == 15
    kept = [micro.inputs[row, :n].tolist() for row, n in enumerate(sizes)]
    assert inputs["input_ids"].tolist() == [[token for row in kept for token in row]]
    row, column = torch.tensor([0, 4, 5]), torch.tensor([7, 14, 0])
    assert laid_out.places(row, column).tolist() == [7, 28, 29]
    assert padded(micro).places(row, column).tolist() == [7, 4 * 15 + 14, 5 * 15]


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_those_of_padded_rows(name: str) -> None:
    policy, micro = qwen(**MODELS[name]), ragged()
    expected = outcome(policy, plain_forward, micro)
    packed_attention.use(policy)
    require_equal(outcome(policy, FastForward(layout=packed), micro), expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_sequence_sees_nothing_of_its_neighbours(name: str) -> None:
    policy, micro = qwen(**MODELS[name]), ragged()
    packed_attention.use(policy)
    forward = FastForward(layout=packed)
    other = replace(micro, inputs=micro.inputs.clone())
    other.inputs[0, :8] = 7
    with torch.no_grad():
        before, after = forward(policy, micro), forward(policy, other)
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1:], after[1:])


@pytest.mark.parametrize("name", MODELS)
def test_a_call_that_is_not_packed_answers_as_before(name: str) -> None:
    """The checks that compare policy and server go on as they did."""
    policy, micro = qwen(**MODELS[name]), ragged()
    terms = (micro.inputs, micro.targets, micro.temperature)
    with torch.no_grad():
        before = token_logprobs(policy, *terms)
        packed_attention.use(policy)
        assert torch.equal(token_logprobs(policy, *terms), before)
        packed_attention.leave(policy)
        assert torch.equal(token_logprobs(policy, *terms), before)


def test_it_is_not_saved_with_the_model(tmp_path: Path) -> None:
    policy = qwen()
    packed_attention.use(policy)
    policy.save_pretrained(tmp_path)
    assert packed_attention.NAME not in (tmp_path / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation == packed_attention.DEFAULT


SMALL = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
REFUSED: dict[str, tuple[Any, str]] = {
    "softcap": (Gemma2Config(**SMALL), "attn_logit_softcapping = 50"),
    "sinks": (
        GptOssConfig(**SMALL, num_local_experts=2),
        "transformers computes its attention as 'eager'",
    ),
    "chunks": (
        Llama4TextConfig(**SMALL, num_local_experts=2, intermediate_size_mlp=32),
        "attention_chunk_size = 8192",
    ),
    "no attention": (
        MambaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=1),
        "not one that flash kernels compute",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_compute_is_named(name: str) -> None:
    config, reason = REFUSED[name]
    model = AutoModelForCausalLM.from_config(config)
    assert reason in "; ".join(packed_attention.obstacles(model))


def test_layers_of_other_kinds_are_named() -> None:
    model = qwen()
    model.config.layer_types = ["linear_attention", "full_attention"]
    (told,) = packed_attention.obstacles(model)
    assert "linear_attention" in told


def test_a_plain_model_has_no_obstacle() -> None:
    model = qwen(**WINDOW)
    assert packed_attention.obstacles(model) == []
    packed_attention.use(model)
    assert packed_attention.obstacles(model) == []


def never(*_: Any) -> Any:
    raise AssertionError


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"softcap": 30.0}, "softcap"),
        ({"s_aux": torch.zeros(2)}, "s_aux"),
        ({"position_bias": torch.zeros(2)}, "position_bias"),
        ({"dropout": 0.1}, "dropout of 0.1"),
        ({"is_causal": False}, "not causal"),
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "a mask of its own|attention mask"),
    ],
)
def test_a_layer_that_asks_for_more_is_refused(asked: dict[str, Any], told: str) -> None:
    heads = torch.zeros(1, 2, 3, 8)
    arguments: dict[str, Any] = {"attention_mask": None} | asked
    with pytest.raises(FastPathRefused, match=told):
        packed_attention.packed_attention(
            nn.Module(), heads, heads, heads, default=never, **arguments
        )


@pytest.mark.parametrize("fewer_heads", [True, False], ids=["as torch 2.13", "as torch 2.11"])
@pytest.mark.parametrize("name", MODELS)
def test_flash_attention_is_asked_for_the_same(
    name: str, fewer_heads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, micro = qwen(**MODELS[name]), ragged()
    expected = outcome(policy, plain_forward, micro)
    promised = "enable_gqa" in inspect.signature(varlen_attn).parameters
    with flash_on_cpu():
        use_flash(policy, fewer_heads and promised, monkeypatch)
        require_equal(outcome(policy, FastForward(layout=packed), micro), expected)
    heads = 2 if fewer_heads and promised and name != "as many heads" else 4
    first, second = CALLS
    assert first == Call((2, 0) if name == "window" else (-1, 0), heads)
    assert second == Call((-1, 0), heads)


def use_flash(policy: Any, fewer_heads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the policy were on a GPU, and in a 16-bit type."""
    monkeypatch.setattr(Flash, "on", lambda _: Flash(takes_fewer_heads=fewer_heads))
    monkeypatch.setattr(Flash, "computes", lambda *_: True)
    packed_attention.use(policy)


@pytest.mark.parametrize(
    ("dtype", "width", "value_width", "computes"),
    [
        (torch.bfloat16, 64, 64, True),
        (torch.float16, 256, 256, True),
        (torch.float32, 64, 64, False),
        (torch.bfloat16, 60, 60, False),
        (torch.bfloat16, 264, 264, False),
        (torch.bfloat16, 192, 128, False),
    ],
)
def test_what_flash_attention_computes(
    dtype: torch.dtype, width: int, value_width: int, computes: bool
) -> None:
    query = torch.zeros(1, 1, 1, width, dtype=dtype)
    value = torch.zeros(1, 1, 1, value_width, dtype=dtype)
    assert Flash(takes_fewer_heads=True).computes(query, value) is computes


@pytest.mark.parametrize(("capability", "there"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_gpus_that_have_flash_attention(
    capability: tuple[int, int], there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert (Flash.on(torch.device("cuda", 0)) is not None) is there
    assert Flash.on(torch.device("cpu")) is None


def test_the_configuration_of_a_model_names_its_kinds_of_layers() -> None:
    """What `obstacles` reads."""
    assert qwen(**WINDOW).config.layer_types == WINDOW["layer_types"]
    assert hasattr(AutoConfig.for_model("qwen3_next"), "layer_types")
