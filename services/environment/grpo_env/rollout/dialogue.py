"""Conducts a conversation with the policy and records it, token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_core.clients.inference import Completion
from grpo_env.rollout.chat_template import ChatTemplate, answered
from grpo_env.rollout.groups import (
    STOPPED,
    CompletionSource,
    SamplingPlan,
    TrainingSequence,
    complete,
)
from grpo_env.tasks import Answer, ContextFull, Message, State
from grpo_env.tasks.items import Item


@dataclass
class _Conversation(TrainingSequence):
    """One sequence that can go on.

    messages: also those of the policy; as_given: as the task passed the beginning of an answer.
    is_answered: whether its last message is an answer of the policy, so that it can go on.
    """

    as_given: list[Message] = field(default_factory=list)
    is_chat: bool = True
    is_answered: bool = False

    def known_part(self, messages: str | Sequence[Message]) -> int:
        """Number of messages that this conversation begins with; 0 if it is another one. A message
        that the policy continued may be there with its answer, or before it."""
        if not self.is_answered or not self.is_chat or isinstance(messages, str):
            return 0
        for known in (self.messages, self.as_given):
            if list(messages[: len(known)]) == known:
                return len(known)
        return 0


class RecordedDialogue:
    """One rollout. See `grpo_env.tasks.Dialogue`. It begins with the item's prompt, or with what
    the task says first."""

    def __init__(
        self, source: CompletionSource, template: ChatTemplate, plan: SamplingPlan, item: Item
    ) -> None:
        self._source = source.session()
        self._template = template
        self._plan = plan
        self._task = item.task
        self._conversations: list[_Conversation] = []
        self._allowed = 0  # tokens that all turns might have had
        self.state = State(item.row, item.messages)
        self.last_answer = Answer()

    @property
    def sequences(self) -> list[TrainingSequence]:
        """Those in which the policy said something."""
        return [c for c in self._conversations if c.sampled_ids]

    async def say(
        self,
        messages: str | Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Answer:
        conversation = self._conversation_for(messages, tools)
        conversation.is_answered = False  # until then, equal requests begin sequences of their own
        room = self._plan.max_token_length - 1 - len(conversation.tokens)
        limit = min(max_tokens or self._plan.completion_limit(self._task, room), room)
        sampling = self._plan.sampling(limit, stop)
        [completion] = await complete(self._source, conversation.tokens, 1, sampling)
        return self._record(conversation, completion, limit)

    def begin_with(
        self, prompt: str | Sequence[Message], completion: Completion, limit: int
    ) -> None:
        """Record a first answer that was sampled with others, of at most `limit` tokens."""
        self._record(self._conversation_for(prompt, ()), completion, limit)

    def _record(self, conversation: _Conversation, completion: Completion, limit: int) -> Answer:
        said: Message = {"role": "assistant", "content": completion.text}
        if conversation.sampled_ids:
            # A later answer begins behind a turn that the template has closed.
            begun: list[Message] = [{"role": "user", "content": ""}]
            conversation.messages.append(said)
        else:
            begun = conversation.messages
            conversation.messages = answered(begun, completion.text)
        conversation.add_completion(completion)
        conversation.as_given.append(said)
        conversation.is_answered = True
        self.state.messages = [*conversation.messages]
        self.state.turn += 1
        self._allowed += limit
        self.last_answer = Answer(
            completion.text,
            finished=completion.finish_reason == STOPPED,
            messages=self.state.messages,
            state=self.state,
            token_ids=[token for c in self._conversations for token in c.sampled_ids],
            max_tokens=self._allowed,
            opening=self._template.opening(begun if conversation.is_chat else ""),
            call_format=self._template.call_format,
        )
        return self.last_answer

    def _conversation_for(
        self, messages: str | Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> _Conversation:
        for known in reversed(self._conversations):
            if count := known.known_part(messages):
                new: Sequence[Message] = messages[count:]  # type: ignore[assignment]
                self._add_prompt(known, self._template.turn_ids(new, known.tokens[-1]))
                known.messages += new
                known.as_given += new
                return known
        is_chat = not isinstance(messages, str)
        shown: list[Message] = (
            [{"role": "user", "content": messages}] if isinstance(messages, str) else [*messages]
        )
        begun = _Conversation(messages=shown, as_given=[*shown], is_chat=is_chat)
        self._add_prompt(begun, self._template.prompt_ids(messages, tools))
        self._conversations.append(begun)
        return begun

    def _add_prompt(self, conversation: _Conversation, token_ids: list[int]) -> None:
        tokens = len(conversation.tokens) + len(token_ids)
        if tokens >= self._plan.max_token_length - 1:
            raise ContextFull(
                f"the conversation would have {tokens} tokens, and the limit for a whole sequence "
                f"is {self._plan.max_token_length}; raise --seq-len of the environment and of the "
                "trainer, or end conversations earlier"
            )
        conversation.add_prompt(token_ids)
