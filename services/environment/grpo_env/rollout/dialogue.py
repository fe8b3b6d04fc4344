"""Conducts a conversation with the policy and records it, token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from grpo_core.clients.inference import Completion, GenerateAnswer
from grpo_core.errors import ProtocolViolation, RequestRefused
from grpo_env.rollout.chat_template import ChatTemplate, answered
from grpo_env.rollout.groups import (
    STOPPED,
    FailureReason,
    GroupLost,
    SamplingPlan,
    TrainingSequence,
    raise_if_aborted,
)
from grpo_env.tasks import Answer, ContextFull, Message, State, Task


class Session(Protocol):
    """The requests of one conversation, which stay on one server."""

    async def generate(self, prompt_token_ids: list[int], **sampling: Any) -> GenerateAnswer: ...


class Generation(Session, Protocol):
    """Samples completions on one or several servers."""

    def session(self) -> Session: ...


@dataclass
class _Conversation:
    """One sequence and the messages that it stands for, the policy's answers included.

    is_answered: whether its last message is an answer of the policy, so that it can go on.
    """

    prompt: str | list[Message]
    messages: list[Message]
    as_given: list[Message]
    sequence: TrainingSequence = field(default_factory=TrainingSequence)
    is_answered: bool = False

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.prompt, str)

    def known_part(self, messages: str | Sequence[Message]) -> int:
        """Number of messages that this conversation begins with; 0 if it is another one. A message
        that the policy continued may be there with its answer, or before it."""
        if not self.is_answered or isinstance(messages, str) or isinstance(self.prompt, str):
            return 0
        for known in (self.messages, self.as_given):
            if list(messages[: len(known)]) == known:
                return len(known)
        return 0


class RecordedDialogue:
    """One rollout. See `grpo_env.tasks.dialogue.Dialogue`."""

    def __init__(
        self, session: Session, template: ChatTemplate, plan: SamplingPlan, task: Task, state: State
    ) -> None:
        self._session = session
        self._template = template
        self._plan = plan
        self._task = task
        self._state = state
        self._conversations: list[_Conversation] = []
        self._allowed = 0  # tokens that all turns might have had
        self.last_answer = Answer()

    async def say(
        self,
        messages: str | Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Answer:
        conversation = self._conversation_for(messages, tools)
        conversation.is_answered = False  # until then, equal requests begin sequences of their own
        sequence = conversation.sequence
        room = self._plan.max_token_length - 1 - len(sequence.tokens)
        limit = min(max_tokens or self._plan.completion_limit(self._task, room), room)
        completion = await self._sample(sequence.tokens, limit, stop)
        is_first = not sequence.sampled_ids
        # A later answer begins behind a turn that the template has closed.
        behind_a_turn: list[Message] = [{"role": "user", "content": ""}]
        begun = conversation.messages if is_first else behind_a_turn
        opening = self._template.opening(begun if conversation.is_chat else "")
        sequence.add_completion(completion)
        conversation.messages = (
            answered(conversation.messages, completion.text)
            if is_first
            else [*conversation.messages, {"role": "assistant", "content": completion.text}]
        )
        conversation.as_given.append({"role": "assistant", "content": completion.text})
        conversation.is_answered = True
        self._state.messages = [*conversation.messages]
        self._state.turn += 1
        self._allowed += limit
        self.last_answer = Answer(
            completion.text,
            finished=completion.finish_reason == STOPPED,
            messages=self._state.messages,
            state=self._state,
            token_ids=[token for c in self._conversations for token in c.sequence.sampled_ids],
            max_tokens=self._allowed,
            opening=opening,
            call_format=self._template.call_format,
        )
        return self.last_answer

    @property
    def sequences(self) -> list[TrainingSequence]:
        """Those in which the policy said something."""
        return [c.sequence for c in self._conversations if c.sequence.sampled_ids]

    @property
    def messages(self) -> list[list[Message]]:
        """The conversation of each of `sequences`."""
        return [c.messages for c in self._conversations if c.sequence.sampled_ids]

    def _conversation_for(
        self, messages: str | Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> _Conversation:
        for known in reversed(self._conversations):
            if count := known.known_part(messages):
                self._continue(known, messages[count:])  # type: ignore[arg-type]
                return known
        prompt = messages if isinstance(messages, str) else [*messages]
        shown: list[Message] = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        )
        begun = _Conversation(prompt, shown, [*shown])
        begun.sequence.add_prompt(self._template.prompt_ids(prompt, tools))
        self._check_room(len(begun.sequence.tokens))
        self._conversations.append(begun)
        return begun

    def _continue(self, conversation: _Conversation, new: Sequence[Message]) -> None:
        sequence = conversation.sequence
        turn_ids = self._template.turn_ids(new, sequence.tokens[-1])
        self._check_room(len(sequence.tokens) + len(turn_ids))
        sequence.add_prompt(turn_ids)
        conversation.messages += new
        conversation.as_given += new

    def _check_room(self, tokens: int) -> None:
        if tokens >= self._plan.max_token_length - 1:
            raise ContextFull(
                f"the conversation would have {tokens} tokens, and the limit for a whole sequence "
                f"is {self._plan.max_token_length}; raise --seq-len of the environment and of the "
                "trainer, or end conversations earlier"
            )

    async def _sample(self, prompt_ids: list[int], limit: int, stop: Sequence[str]) -> Completion:
        sampling: dict[str, Any] = {**self._plan.sampling, "max_tokens": limit}
        if stop:
            sampling["stop"] = [*stop]
        try:
            answer = await self._session.generate(prompt_ids, n=1, **sampling)
        except RequestRefused as error:
            raise GroupLost(FailureReason.REFUSED, str(error)) from error
        completions = answer.completions()
        if len(completions) != 1 or answer.prompt_token_ids != prompt_ids:
            raise ProtocolViolation(
                "vllm-server: the response from /generate contains "
                f"{len(completions)} completions instead of 1, or another prompt"
            )
        raise_if_aborted(completions)
        return completions[0]
