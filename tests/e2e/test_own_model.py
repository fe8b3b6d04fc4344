"""The demo with somebody else's model: another architecture, tokenizer, template and data type."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

STEPS = 2
DEADLINE_S = 1800
LETTERS = "0123456789#\n ?abcdehimnoprstuwyERHS[]<>."
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}</s>"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


def make_model(directory: Path) -> None:
    """Random weights over few letters, so that answers with a number at their end are common."""
    vocabulary = {word: i for i, word in enumerate(["<unk>", "</s>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", chat_template=TEMPLATE
    ).save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.token_to_id("</s>"),
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


@pytest.mark.timeout(DEADLINE_S + 60)
def test_another_model_is_trained_and_saved(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    rows = [{"question": f"How much is {n}?", "answer": f"#### {n}"} for n in range(40)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = [
        *(sys.executable, "-m", "grpo_local"),
        *("--task", "gsm8k", "--data", str(tmp_path / "data")),
        *("--model", str(tmp_path / "model"), "--dtype", "bfloat16", "--lr", "1e-3"),
        *("--seq-len", "256", "--max-model-len", "300", "--kv-cache-mib", "32"),
        *("--max-completion-tokens", "64"),
        *("--steps", str(STEPS), "--batch-size", "16", "--gradient-accumulation-steps", "1"),
        *("--run-dir", str(tmp_path / "run")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"

    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    final = tmp_path / "run" / "checkpoints" / "final_model"
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    after = AutoModelForCausalLM.from_pretrained(final)
    assert after.config.model_type == "llama"
    assert after.dtype == torch.bfloat16
    assert any(not torch.equal(before[name], value) for name, value in after.state_dict().items())
