"""Runs the demo on the word problems of GSM8K, and with a model of another architecture."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from grpo_core.rollouts.files import ROLLOUTS, read_steps
from tests.e2e.demo_run import DEADLINE_S, NOISE, run_demo

STEPS = 3
DATA = Path(
    os.environ.get("GSM8K_DIR")
    or Path(__file__).resolve().parents[2].parent / "shared" / "data" / "gsm8k"
)
LETTERS = "0123456789#\n ?abcdehimnoprstuwyERHS[]<>."
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}</s>"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)

pytestmark = [pytest.mark.full, pytest.mark.timeout(DEADLINE_S + 60)]


def test_word_problems_are_all_asked_and_every_step_trains_on_graded_answers(
    tmp_path: Path,
) -> None:
    train = DATA / "train.jsonl"
    if not train.is_file():
        pytest.skip(f"no data: {train} is not there; set GSM8K_DIR to a directory with it")
    run = run_demo(
        tmp_path / "run",
        *("--task", "gsm8k", "--data", str(DATA), "--steps", str(STEPS)),
        # two groups of 8: the fewest that show the loop
        *("--batch-size", "16", "--gradient-accumulation-steps", "1"),
    )
    assert [record["step"] for record in run.records] == list(range(1, STEPS + 1))
    # Some answers have part of the required form, hardly any is correct.
    assert all(0.0 < record["reward/mean"] < 0.5 for record in run.records)
    assert run.records[0]["alignment/probe_max"] < NOISE
    log = (run.directory / "logs" / "environment.log").read_text()
    assert f"kept={len(train.read_text(encoding='utf-8').splitlines())} " in log
    assert "too_long=0" in log
    assert "quarantined" not in log
    assert all(record.reason for record in read_steps(run.directory / ROLLOUTS))
    assert f"GRPO on gsm8k with a tiny model: {STEPS} training steps" in run.output


def make_model(directory: Path) -> None:
    """Another architecture, tokenizer, template and data type than those of the tiny model.

    Its vocabulary is so small that answers with a number at their end are common.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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


def test_a_model_of_another_architecture_is_trained_and_saved_in_its_data_type(
    tmp_path: Path,
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    make_model(tmp_path / "model")
    rows = [{"question": f"How much is {n}?", "answer": f"#### {n}"} for n in range(40)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = run_demo(
        tmp_path / "run",
        *("--task", "gsm8k", "--data", str(tmp_path / "data")),
        *("--model", str(tmp_path / "model"), "--dtype", "bfloat16", "--lr", "1e-3"),
        *("--seq-len", "256", "--max-model-len", "300", "--kv-cache-mib", "32"),
        *("--max-completion-tokens", "64", "--steps", str(STEPS)),
        *("--batch-size", "16", "--gradient-accumulation-steps", "1"),
    )
    assert [record["step"] for record in run.records] == list(range(1, STEPS + 1))
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    after = AutoModelForCausalLM.from_pretrained(run.directory / "checkpoints" / "final_model")
    assert (after.config.model_type, after.dtype) == ("llama", torch.bfloat16)
    assert any(not torch.equal(before[name], value) for name, value in after.state_dict().items())
