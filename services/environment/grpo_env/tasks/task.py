"""The base class of tasks, and what passes between a task and a rollout."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self

from grpo_core.errors import GrpoError
from grpo_env.tasks.rows import Row, Split, TaskOptions, messages_of, rows_of
from grpo_env.tasks.tool_calls import CallFormat, Message
from grpo_env.tasks.tools import answer_calls, is_coroutine


class State(dict[str, Any]):
    """What a conversation is about: a dict for the task's own use.

    `row`: the record of the data set; `messages`: the conversation so far; `turn`: the number of
    answers that the model has given.
    """

    def __init__(self, row: Row, messages: Sequence[Message] = ()) -> None:
        super().__init__()
        self.row = row
        self.messages = list(messages)
        self.turn = 0


class Answer(str):
    """The text of a completion; in a conversation, the last text of the model.

    finished: False if the token limit cut it off.
    messages: the whole conversation, this answer included.
    state: the conversation's state.
    token_ids: all tokens that the model sampled, in all its turns.
    context_tokens, new_tokens: number of tokens before this answer, and of this answer alone.
    max_tokens: the largest number of tokens that `token_ids` might have had.
    step, steps: training steps that are done, and of the whole run.
    opening: what the prompt already holds of this answer: the `<think>` of the chat template, and
        the text of a last message of the assistant, which the model continues.
    call_format: how the model's chat template asks for calls of tools. None: not known.
    """

    def __new__(cls, text: str = "", **_: Any) -> Self:
        return super().__new__(cls, text)

    def __init__(
        self,
        text: str = "",  # noqa: ARG002 - the value, see `__new__`
        *,
        finished: bool = True,
        messages: Sequence[Message] = (),
        state: State | None = None,
        token_ids: Sequence[int] = (),
        context_tokens: int = 0,
        new_tokens: int = 0,
        max_tokens: int = 0,
        step: int = 0,
        steps: int = 1,
        opening: str = "",
        call_format: CallFormat | None = None,
    ) -> None:
        self.finished = finished
        self.messages = messages
        self.state = State({}) if state is None else state
        self.token_ids = token_ids
        self.context_tokens = context_tokens
        self.new_tokens = new_tokens
        self.max_tokens = max_tokens
        self.step = step
        self.steps = steps
        self.opening = opening
        self.call_format = call_format


@dataclass(frozen=True)
class Graded:
    """The named parts of a reward, and why they are what they are, for the reader of rollouts.

    parts: None: this part does not apply to this answer, and is left out.
    score: if the task computes it itself. None: the weighted sum of the parts.
    metrics: numbers that are logged with the parts, and never count.
    """

    parts: Mapping[str, float | None]
    reason: str = ""
    score: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


Reward = float | Mapping[str, float | None] | Graded
"""A single number is the part `reward`. A part that is None is left out."""


class ContextFull(GrpoError):
    """The conversation has no room for another token; see --seq-len."""


class MessagesUnusable(GrpoError):
    """The chat template of the model cannot render these messages."""


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
        begins, and the rollout has several. If it goes on from an earlier answer, it repeats the
        tokens up to there as a part of its prompt. Several calls may run side by side.

        Args:
            messages: the whole conversation, or a text to continue as it is
            tools: JSON schemas for the chat template
            max_tokens: of this answer; None for the task's limit
            stop: texts that end this answer

        Raises:
            ContextFull: the conversation reached the limit for a whole sequence.
            MessagesUnusable: see there.
            TokenizerUnusable: the model's chat template does not show the tools.
            ServiceUnavailable: the inference server does not answer.
        """

    def count(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> int:
        """The tokens before the answer that `say` would give. Raises as `say`, apart from
        `ContextFull`."""

    def cut_off(self) -> None:
        """The rollout ends because of a limit: its last answer is not finished."""


class Task:
    """Base class of all tasks. A subclass overrides what differs.

    name: names the task in metrics; the class's name if it is empty.
    max_completion_tokens: limit of tokens of one completion, if the user sets none. None: as many
        as the sequence has room for.
    max_turns: largest number of completions in one conversation.
    max_sequences: largest number of sequences of one rollout, if messages of a conversation are
        replaced or left out.
    tools: functions (or JSON schemas) that the model may call. The chat template shows them to the
        model, and `step` answers the calls.
    stop: texts that end a completion.
    weights: of the parts of the reward; 1 for parts that are missing here.
    held_out: share of the rows that are kept for evaluation if there is no other data for it.
    blocks: whether `reward` may take long. It then runs in another process, where the task is made
        again, without what its other methods have done to `self`. An `async` reward, one of a task
        with a `step` of its own, and one with `has_process` run in a thread of this process.
    has_process: `reward` asks a process of its own (`MathGrader`), which forks cannot share.
    """

    name: str = ""
    max_completion_tokens: int | None = None
    max_sequences: int = 1
    max_turns: int = 8
    tools: Sequence[Callable[..., Any] | Mapping[str, Any]] = ()
    stop: Sequence[str] = ()
    weights: Mapping[str, float] = {}
    held_out: float = 0.1
    blocks: bool = True
    has_process: ClassVar[bool] = False
    drives_itself: ClassVar[bool] = False
    """True: `run` conducts the whole rollout."""
    max_sequences_option: ClassVar[str] = "max_sequences of the task"
    """What a user changes to allow more."""
    names_prompts: ClassVar[bool] = False
    """True: `prompt` only names a row, and `run` has prompts of its own."""
    rates_groups: bool = False
    """True: `run_group` takes the place of `run`."""

    def __init__(self, options: TaskOptions) -> None:
        self.options = options
        self.name = self.name or type(self).__name__.lower()

    def rows(self, split: Split) -> Sequence[Row] | None:
        """The records of `--data`, or for evaluation of `--eval-data`. None: no data for this
        split.

        Raises:
            DataUnusable: no data, or invalid rows; the message lists the first of them.
        """
        return rows_of(self.options, split)

    def prompt(self, row: Row) -> str | Sequence[Message]:
        """The conversation that the policy continues. A `str` is continued as it is, without the
        chat template. If the last message is the assistant's, the policy continues its text.

        Raises:
            ValueError: the row has no usable prompt.
        """
        return messages_of(row, self.options.system_prompt)

    async def step(self, state: State, message: Answer) -> Sequence[Message] | None:  # noqa: ARG002
        """The next messages after the model's message; None ends the conversation.

        If the task has tools, calls in the message are answered by them.
        """
        return await answer_calls(message, self.tools) if self.tools else None

    def reward(self, answer: Answer, row: Row) -> Reward | Awaitable[Reward]:
        """Rate one answer. The score is the weighted sum of the parts. May be `async`.

        Any exception, and any value that is not finite, drops the group: an answer that cannot be
        graded never gets a score of 0.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no reward(answer, row)")

    async def run(self, row: Row, dialogue: Dialogue) -> Reward | None:
        """Conduct one rollout and rate it, if `drives_itself`. None: `reward` rates it. Raises
        `RolloutFailed`: it ended with an error."""
        raise NotImplementedError

    async def run_group(self, row: Row, dialogues: Sequence[Dialogue]) -> Sequence[Reward]:
        """Conduct all rollouts of a group and rate them together, if `rates_groups`."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what the task holds."""

    def checked_arguments(self, **defaults: Any) -> dict[str, Any]:
        """The user's `--task-args` over these defaults. Raises `ValueError` for an argument without
        a default."""
        if unknown := sorted(self.options.args.keys() - defaults.keys()):
            raise ValueError(
                f"--task-args: {self.name} has no argument {', '.join(unknown)}; it has "
                f"{', '.join(defaults)}"
            )
        return {**defaults, **self.options.args}

    @property
    def has_async_reward(self) -> bool:
        """Whether `reward` gives a coroutine, of its own or of a function that it calls."""
        return is_coroutine(self.reward)

    @property
    def has_steps(self) -> bool:
        """Whether the task answers the model with code of its own."""
        return type(self).step is not Task.step

    @property
    def is_conversation(self) -> bool:
        """Whether the policy may answer more than once."""
        return bool(self.tools) or self.has_steps
