"""Conducts a conversation with the policy and records it, token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from grpo_core.clients.inference import Completion, GenerateAnswer
from grpo_core.errors import ProtocolViolation, RequestRefused
from grpo_env.rollout.chat_template import ChatTemplate, answered
from grpo_env.rollout.groups import (
    CUT_OFF,
    STOPPED,
    FailureReason,
    GroupLost,
    SamplingPlan,
    TrainingSequence,
)
from grpo_env.tasks import Answer, ContextFull, Message, State, Task


class CompletionSource(Protocol):
    """Samples completions, on one or several servers."""

    async def generate(self, prompt_token_ids: list[int], **sampling: Any) -> GenerateAnswer: ...

    def session(self) -> CompletionSource:
        """The source for all requests of one conversation, which stay on one server."""


async def complete(
    source: CompletionSource, prompt_ids: list[int], count: int, sampling: Mapping[str, Any]
) -> list[Completion]:
    """Sample completions of one prompt, in one request.

    Raises:
        GroupLost: the server refused the request, or ended a completion before its end.
        ProtocolViolation: the answer has another prompt, or another number of completions.
        ServiceUnavailable: no server answers.
    """
    try:
        answer = await source.generate(prompt_ids, n=count, **sampling)
    except RequestRefused as error:
        raise GroupLost(FailureReason.REFUSED, str(error)) from error
    completions = answer.completions()
    problems = []
    if len(completions) != count:
        problems.append(f"{len(completions)} completions instead of {count}")
    if answer.prompt_token_ids != prompt_ids:
        problems.append("prompt_token_ids that differ from the request")
    if problems:
        raise ProtocolViolation(
            "vllm-server: the response from /generate contains " + "; ".join(problems)
        )
    # The text of an aborted completion is not the policy's whole answer.
    aborted = sorted({completion.finish_reason for completion in completions} - {STOPPED, CUT_OFF})
    if aborted:
        raise GroupLost(
            FailureReason.ABORTED,
            f"the server ended a completion with finish reason {', '.join(aborted)}",
            sum(len(completion.token_ids) for completion in completions),
        )
    return completions


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
    """One rollout. See `grpo_env.tasks.Dialogue`.

    sequences: those in which the policy said something.
    """

    def __init__(
        self,
        source: CompletionSource,
        template: ChatTemplate,
        plan: SamplingPlan,
        task: Task,
        state: State,
    ) -> None:
        self._source = source.session()
        self._template = template
        self._plan = plan
        self._task = task
        self._state = state
        self._conversations: list[_Conversation] = []
        self._allowed = 0  # tokens that all turns might have had
        self.last_answer = Answer()

    @property
    def sequences(self) -> list[TrainingSequence]:
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
        sampling: dict[str, Any] = {**self._plan.sampling, "max_tokens": limit}
        if stop:
            sampling["stop"] = [*stop]
        [completion] = await complete(self._source, conversation.tokens, 1, sampling)
        opening = self._record(conversation, completion)
        self._state.messages = [*conversation.messages]
        self._state.turn += 1
        self._allowed += limit
        self.last_answer = Answer(
            completion.text,
            finished=completion.finish_reason == STOPPED,
            messages=self._state.messages,
            state=self._state,
            token_ids=[token for c in self._conversations for token in c.sampled_ids],
            max_tokens=self._allowed,
            opening=opening,
            call_format=self._template.call_format,
        )
        return self.last_answer

    def _record(self, conversation: _Conversation, completion: Completion) -> str:
        """Add an answer to its sequence; returns what the prompt already held of it."""
        said: Message = {"role": "assistant", "content": completion.text}
        if conversation.sampled_ids:
            # A later answer begins behind a turn that the template has closed.
            begun: list[Message] = [{"role": "user", "content": ""}]
            continued = [*conversation.messages, said]
        else:
            begun = conversation.messages
            continued = answered(conversation.messages, completion.text)
        opening = self._template.opening(begun if conversation.is_chat else "")
        conversation.add_completion(completion)
        conversation.messages = continued
        conversation.as_given.append(said)
        conversation.is_answered = True
        return opening

    def _conversation_for(
        self, messages: str | Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> _Conversation:
        for known in reversed(self._conversations):
            if count := known.known_part(messages):
                self._continue(known, messages[count:])  # type: ignore[arg-type]
                return known
        is_chat = not isinstance(messages, str)
        shown: list[Message] = (
            [{"role": "user", "content": messages}] if isinstance(messages, str) else [*messages]
        )
        begun = _Conversation(messages=shown, as_given=[*shown], is_chat=is_chat)
        begun.add_prompt(self._template.prompt_ids(messages, tools))
        self._check_room(len(begun.tokens))
        self._conversations.append(begun)
        return begun

    def _continue(self, conversation: _Conversation, new: Sequence[Message]) -> None:
        turn_ids = self._template.turn_ids(new, conversation.tokens[-1])
        self._check_room(len(conversation.tokens) + len(turn_ids))
        conversation.add_prompt(turn_ids)
        conversation.messages += new
        conversation.as_given += new

    def _check_room(self, tokens: int) -> None:
        if tokens >= self._plan.max_token_length - 1:
            raise ContextFull(
                f"the conversation would have {tokens} tokens, and the limit for a whole sequence "
                f"is {self._plan.max_token_length}; raise --seq-len of the environment and of the "
                "trainer, or end conversations earlier"
            )
