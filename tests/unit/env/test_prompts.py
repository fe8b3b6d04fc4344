from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from grpo_env.prompts import ChatPrompts, TokenizerUnusable
from grpo_env.tasks.arithmetic import Sum


def test_the_prompt_ends_where_the_assistant_starts_and_gets_no_extra_tokens(
    tokenizer_dir: Path,
) -> None:
    from transformers import AutoTokenizer

    token_ids = ChatPrompts(str(tokenizer_dir)).encode(Sum(3, 4).messages)

    text = "<|im_start|>user\n3+4=<|im_end|>\n<|im_start|>assistant\n"
    assert AutoTokenizer.from_pretrained(tokenizer_dir).decode(token_ids) == text
    # Two starts and one end are one token each, every other character is a byte.
    assert len(token_ids) == 3 + len("user\n3+4=" + "\n" + "assistant\n")


def test_a_tokenizer_without_a_chat_template_is_refused(
    tokenizer_dir: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tokenizer_dir, bare, ignore=shutil.ignore_patterns("chat_template*"))

    with pytest.raises(TokenizerUnusable, match="no chat template"):
        ChatPrompts(str(bare))
