"""Records one rollout: decides which sequence an answer continues, and keeps its exact tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_core.clients.inference import Completion
from grpo_env.inference.server import Home
from grpo_env.rollout.chat_template import ChatTemplate, answered
from grpo_env.rollout.groups import (
    CUT_OFF,
    STOPPED,
    AnswerEnd,
    Generate,
    SamplingPlan,
    TrainingSequence,
    complete,
)
from grpo_env.tasks import Answer, ContextFull, Message, State
from grpo_env.tasks.items import Item

_BEHIND_A_TURN: list[Message] = [{"role": "user", "content": ""}]
"""Stands for what precedes any answer but the first: it ends with a turn of somebody else, so the
answer has no beginning but the template's."""


@dataclass(frozen=True)
class Turn:
    """What precedes an answer.

    sequence: the one that the answer joins, as it is before; token_ids, messages: what is added to
    it before the answer; is_new: the rollout does not have it yet.
    """

    sequence: TrainingSequence
    messages: Sequence[Message]
    token_ids: Sequence[int]
    is_new: bool

    @property
    def prompt_ids(self) -> list[int]:
        """[T] of the whole sequence before the answer."""
        return [*self.sequence.tokens, *self.token_ids]


class RecordedDialogue:
    """One rollout. See `grpo_env.tasks.Dialogue`. It begins with the item's prompt, or with what
    the task says first. An answer that never came leaves no trace.

    Its sequences are in the order in which they were begun, whichever answer came first.
    """

    def __init__(
        self, generate: Generate, template: ChatTemplate, plan: SamplingPlan, item: Item
    ) -> None:
        self._generate, self._home = generate, Home()
        self._template = template
        self._plan = plan
        self._task = item.task
        self._allowed = 0  # tokens that all turns might have had
        self._begun: list[TrainingSequence] = []
        self._newest: TrainingSequence | None = None  # which got the last answer
        self.state = State(item.row, item.messages)
        self.last_answer = Answer()

    @property
    def sequences(self) -> list[TrainingSequence]:
        """Those in which the policy said something."""
        return [one for one in self._begun if one.sampled_ids]

    async def say(
        self,
        messages: str | Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Answer:
        turn = self._turn(messages, tools)
        if turn.is_new:
            self._begun.append(turn.sequence)
        prompt_ids = turn.prompt_ids
        most = self._plan.completion_limit(self._task, self._room(len(prompt_ids)))
        limit = min(max_tokens or most, most)
        turn.sequence.is_answered = False
        try:
            sampling = self._plan.sampling(limit, stop)
            [completion] = await complete(self._generate, prompt_ids, 1, sampling, self._home)
        finally:
            turn.sequence.is_answered = True
        return self._record(turn, completion, limit)

    def count(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> int:
        return len(self._turn(messages, tools).prompt_ids)

    def begin_with(
        self,
        prompt: str | Sequence[Message],
        prompt_ids: list[int],
        completion: Completion,
        limit: int,
    ) -> None:
        """Record a first answer that was sampled with others, of at most `limit` tokens."""
        turn = _first_turn(prompt, prompt_ids, ())
        self._begun.append(turn.sequence)
        self._record(turn, completion, limit)

    def cut_off(self) -> None:
        assert self._newest is not None
        self.last_answer.finished = False
        self._newest.finish_reason = CUT_OFF

    def _turn(self, messages: str | Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Turn:
        if not isinstance(messages, str) and (found := self._continued(messages, tools)):
            return found
        if tools:
            self._template.require_tools(self._task.name, tools[0])
        return _first_turn(messages, self._template.prompt_ids(messages, tools), tools)

    def _continued(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> Turn | None:
        """The turn that repeats the most tokens, of the newest sequence if there are several."""
        found: list[tuple[int, bool, TrainingSequence, int]] = []
        for sequence in reversed(self.sequences):
            if not sequence.is_chat or [*sequence.tools] != [*tools]:
                continue
            if (known := sequence.known_part(messages)) is None:
                continue
            end, count = known
            is_whole = end is sequence.answers[-1] and sequence.is_answered
            if is_whole:
                found.append((end.tokens, True, sequence, count))
            elif messages[-1]["role"] != "assistant":  # whose text the policy would continue
                found.append((end.tokens, False, sequence.branch(end), count))
        if not found:
            return None
        _, is_whole, sequence, count = max(found, key=lambda one: one[:2])
        new = messages[count:]
        token_ids = self._template.turn_ids(new, sequence.tokens[-1])
        return Turn(sequence, new, token_ids, is_new=not is_whole)

    def _room(self, tokens: int) -> int:
        """Tokens that are left for an answer, at least one."""
        room = self._plan.max_token_length - 1 - tokens
        if room < 1:
            raise ContextFull(
                f"the conversation would have {tokens} tokens, and the limit for a whole sequence "
                f"is {self._plan.max_token_length}; raise --seq-len of the environment and of the "
                "trainer, or end conversations earlier"
            )
        return room

    def _record(self, turn: Turn, completion: Completion, limit: int) -> Answer:
        sequence = self._newest = turn.sequence
        sequence.messages += turn.messages
        sequence.as_given += turn.messages
        sequence.add_prompt(turn.token_ids)
        context_tokens = len(sequence.tokens)
        said: Message = {"role": "assistant", "content": completion.text}
        begun: Sequence[Message] = _BEHIND_A_TURN
        if sequence.answers:
            sequence.messages.append(said)
        else:
            begun = sequence.messages  # which the opening of the answer depends on
            sequence.messages = answered(begun, completion.text)
        sequence.as_given.append(said)
        sequence.add_completion(completion)
        sequence.answers.append(
            AnswerEnd(len(sequence.messages), len(sequence.as_given), len(sequence.tokens))
        )
        self.state.messages = [*sequence.messages]
        has_turns = self._task.is_conversation or self._task.drives_itself
        self.state.turn += has_turns
        self._allowed += limit
        self.last_answer = Answer(
            completion.text,
            finished=completion.finish_reason == STOPPED,
            messages=self.state.messages,
            state=self.state,
            token_ids=[token for one in self.sequences for token in one.sampled_ids],
            context_tokens=context_tokens,
            new_tokens=len(completion.token_ids),
            max_tokens=self._allowed,
            step=self._plan.step,
            steps=self._plan.steps,
            opening=self._template.opening(begun if sequence.is_chat else ""),
            # Where nothing answers calls, a reward reads those in every form.
            call_format=self._template.call_format if has_turns else None,
        )
        return self.last_answer


def _first_turn(
    prompt: str | Sequence[Message], prompt_ids: list[int], tools: Sequence[Mapping[str, Any]]
) -> Turn:
    is_chat = not isinstance(prompt, str)
    shown: Sequence[Message] = (
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    )
    begun = TrainingSequence(
        is_chat=is_chat,
        prompt=shown if is_chat else prompt,
        prompt_tokens=len(prompt_ids),
        tools=tools,
    )
    return Turn(begun, shown, prompt_ids, is_new=True)
