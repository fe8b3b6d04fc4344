"""Converts conversations to token ids with the served model's chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import AutoTokenizer

from grpo_core.errors import GrpoError
from grpo_env.tasks import Message


class TokenizerUnusable(GrpoError):
    """The tokenizer cannot be loaded, or cannot render a conversation."""


Encode = Callable[[Sequence[Message]], list[int]]
"""Converts a conversation to the token ids [T] that the policy continues."""


def chat_encoder(tokenizer_name: str) -> Encode:
    """Returns a function that applies the model's own chat template.

    Raises:
        TokenizerUnusable: the tokenizer is missing or has no chat template.
    """
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_name)
    except (OSError, ValueError) as error:
        raise TokenizerUnusable(
            f"no tokenizer at {tokenizer_name!r} ({error}); set --tokenizer to a "
            "Hugging Face id or a directory with a tokenizer"
        ) from error
    if not tokenizer.chat_template:
        raise TokenizerUnusable(
            f"the tokenizer of {tokenizer_name!r} has no chat template; use the tokenizer of an "
            "instruction-tuned model, or add chat_template.jinja to its directory"
        )

    def encode(messages: Sequence[Message]) -> list[int]:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        # The template already writes every special token; adding more would change the prompt.
        token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    return encode
