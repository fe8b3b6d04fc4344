"""The interface through which a task that drives itself lets the policy answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from grpo_core.errors import GrpoError
from grpo_env.tasks import Answer, Message


class ContextFull(GrpoError):
    """The conversation has no room for another token; see --seq-len."""


class Dialogue(Protocol):
    """Records one rollout, token by token."""

    async def say(
        self,
        messages: str | Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Answer:
        """Let the policy continue a conversation.

        If `messages` begin with the conversation so far, answers included, the new answer joins the
        same sequence: nothing that the policy said is tokenised again. Otherwise a new sequence
        begins, and the rollout has several.

        Args:
            messages: the whole conversation, or a text to continue as it is
            tools: JSON schemas for the chat template
            max_tokens: of this answer; None for the task's limit
            stop: texts that end this answer

        Raises:
            ContextFull: the conversation reached the limit for a whole sequence.
            ServiceUnavailable: the inference server does not answer.
        """
