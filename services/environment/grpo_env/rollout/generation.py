"""What a rollout needs of the inference servers."""

from __future__ import annotations

from typing import Any, Protocol

from grpo_core.clients.inference import GenerateAnswer


class Session(Protocol):
    """The requests of one conversation, which stay on one server."""

    async def generate(self, prompt_token_ids: list[int], **sampling: Any) -> GenerateAnswer: ...


class Generation(Session, Protocol):
    """Samples completions on one or several servers."""

    def session(self) -> Session: ...
