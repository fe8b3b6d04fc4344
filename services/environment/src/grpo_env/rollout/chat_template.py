"""Conversations to token ids, with the tokenizer of the served model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import AutoTokenizer

from grpo_core.errors import GrpoError
from grpo_env.tasks import Message


class TokenizerUnusable(GrpoError):
    """The tokenizer cannot be loaded, or cannot render a conversation."""


Encode = Callable[[Sequence[Message]], list[int]]
"""Turns a conversation into the token ids [T] that the policy continues."""


def chat_encoder(tokenizer_name: str) -> Encode:
    """Renders with the model's own chat template.

    Raises:
        TokenizerUnusable: there is no such tokenizer, or it has no template.
    """
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_name)
    except (OSError, ValueError) as error:
        raise TokenizerUnusable(
            f"no tokenizer at {tokenizer_name!r} ({error}); pass --tokenizer with a "
            "hub id or a directory that holds one"
        ) from error
    if not tokenizer.chat_template:
        raise TokenizerUnusable(
            f"the tokenizer of {tokenizer_name!r} has no chat template; use the instruction "
            "model's tokenizer, or add a chat_template.jinja beside it"
        )

    def encode(messages: Sequence[Message]) -> list[int]:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        # The template writes every special token itself; more would shift the prompt.
        token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    return encode
