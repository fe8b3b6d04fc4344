"""Lets a teacher score what the policy said, perhaps behind another system prompt.

The teacher's own prompt takes the place of the tokens before the policy's first answer; all later
tokens stay:

    tokens of the policy   [system] [user] [answer]
    tokens of the teacher  [other, longer system] [user] [answer]
"""

from __future__ import annotations

from collections.abc import Sequence

from grpo_core.errors import RequestRefused
from grpo_core.wire.fields import MASKED
from grpo_env.inference.teacher import TeacherClient
from grpo_env.rollout.chat_template import ChatTemplate
from grpo_env.rollout.groups import FailureReason, GroupLost, TrainingSequence
from grpo_env.tasks import Message


class Teacher:
    """Args:
    client: of its server
    template: of the student, which is the teacher's too
    system_prompt: that the teacher gets in place of the policy's; None: the same
    """

    def __init__(
        self, client: TeacherClient, template: ChatTemplate, system_prompt: str | None = None
    ) -> None:
        self._client = client
        self._template = template
        self._system_prompt = system_prompt

    async def score(self, sequences: Sequence[TrainingSequence]) -> None:
        """Set the teacher's logprobs of the sampled tokens, in one request for all sequences.

        Raises:
            GroupLost: the teacher refused the request.
            TeacherUnavailable, ProtocolViolation: its answer.
        """
        prompts = [self._prompt_ids(sequence) for sequence in sequences]
        starts = [sequence.prompt_tokens for sequence in sequences]
        rows = [
            prompt + sequence.tokens[start:]
            for sequence, prompt, start in zip(sequences, prompts, starts, strict=True)
        ]
        try:
            scored = await self._client.logprobs(rows)
        except RequestRefused as error:
            raise GroupLost(FailureReason.TEACHER_REFUSED, str(error)) from error
        for sequence, logprobs, start in zip(sequences, scored, starts, strict=True):
            behind = logprobs[len(logprobs) - (len(sequence.tokens) - start) :]
            pairs = zip(sequence.masks[start:], behind, strict=True)
            found = [None if mask == MASKED else logprob for mask, logprob in pairs]
            sequence.teacher_logprobs = [*[None] * start, *found]

    def _prompt_ids(self, sequence: TrainingSequence) -> list[int]:
        if self._system_prompt is None:
            return sequence.tokens[: sequence.prompt_tokens]
        prompt = with_system_prompt(sequence.prompt, self._system_prompt)
        return self._template.prompt_ids(prompt, sequence.tools)


def with_system_prompt(
    prompt: str | Sequence[Message], system_prompt: str
) -> str | Sequence[Message]:
    """The prompt with this system message in place of its own. A text without chat template follows
    it after an empty line."""
    if isinstance(prompt, str):
        return f"{system_prompt}\n\n{prompt}"
    rest = prompt[1:] if prompt and prompt[0]["role"] == "system" else prompt
    return [{"role": "system", "content": system_prompt}, *rest]
