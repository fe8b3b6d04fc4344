"""Conversations to token ids, with the tokenizer of the served model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from transformers import AutoTokenizer

from grpo_core.errors import GrpoError
from grpo_env.tasks import Message


class TokenizerUnusable(GrpoError):
    """The tokenizer cannot be loaded, or cannot render a conversation."""


class PromptEncoder(Protocol):
    """Turns a conversation into the token ids that the policy continues."""

    def encode(self, messages: Sequence[Message]) -> list[int]: ...


class ChatPrompts:
    """Renders with the model's own chat template."""

    def __init__(self, tokenizer_name: str) -> None:
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_name)
        except (OSError, ValueError) as error:
            raise TokenizerUnusable(
                f"no tokenizer at {tokenizer_name!r} ({error}); pass --env.tokenizer-name with a "
                "hub id or a directory that holds one"
            ) from error
        if not self._tokenizer.chat_template:
            raise TokenizerUnusable(
                f"the tokenizer of {tokenizer_name!r} has no chat template; use the instruction "
                "model's tokenizer, or add a chat_template.jinja beside it"
            )

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Token ids [T] of the conversation up to where the assistant starts to speak."""
        text = self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        # The template writes every special token itself; more would shift the prompt.
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return token_ids
