"""The teacher of on-policy distillation: a model at another server, which scores what the policy
said, perhaps behind another system prompt.

The teacher's own prompt takes the place of the tokens before the policy's first answer; all later
tokens stay:

    tokens of the policy   [system] [user] [answer]
    tokens of the teacher  [other, longer system] [user] [answer]

The server has `POST /v1/completions` of OpenAI's API, and takes token ids with `echo` and
`logprobs`: vllm-api-server, vLLM, and others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from grpo_core.clients.service import AsyncServiceClient
from grpo_core.errors import (
    GrpoError,
    ProtocolViolation,
    RequestRefused,
    ServiceUnavailable,
    parsing,
)
from grpo_core.weights.model_files import PROBE_TEXT, token_ids
from grpo_core.wire.fields import MASKED
from grpo_env.rollout.chat_template import ChatTemplate
from grpo_env.rollout.groups import FailureReason, GroupLost, TrainingSequence
from grpo_env.tasks import Message

SERVICE = "teacher"
_HINT = "start the teacher's server, or check --teacher-url"
_PROBE_IDS = 128
"""Token ids of the whole vocabulary that are compared, besides those of the text and special
ones."""
_IDS_PER_PROMPT = 16
_UNDECODABLE = "\N{REPLACEMENT CHARACTER}"
_MAX_LISTED = 3


class TeacherUnavailable(ServiceUnavailable):
    """The teacher gave no answer, or only 5xx answers, until the deadline."""


class TeacherUnusable(GrpoError):
    """The server at `--teacher-url` cannot score tokens, or does not serve `--teacher-model`."""


class TeacherTokenizerDiffers(GrpoError):
    """Teacher and student have different tokenizers, so the teacher would score other texts."""


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: list[_Model]


class _Logprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]


class _TeacherChoice(BaseModel):
    index: int
    logprobs: _Logprobs


class _Scored(BaseModel):
    choices: list[_TeacherChoice]


class TeacherClient(AsyncServiceClient):
    """Asks the teacher's server for logprobs.

    Args:
        url: for example http://127.0.0.1:9002/v1
        model: the name under which the server serves it; None: the only one
        deadline_s: seconds for an answer, retries included
        requests: largest number of requests in flight
        api_key: if the server needs one
    """

    def __init__(
        self, url: str, model: str | None, deadline_s: float, requests: int, api_key: str | None
    ) -> None:
        super().__init__(SERVICE, url, deadline_s, deadline_s, requests, api_key, hint=_HINT)
        self.model = model

    async def find_model(self, deadline_s: float) -> None:
        """Wait until the server answers, and learn the name of its model.

        Raises:
            TeacherUnavailable: no answer within `deadline_s` seconds.
            TeacherUnusable: the server lists no models, or several, or not `--teacher-model`.
        """
        try:
            answer = await self._ask("GET", "/v1/models", deadline_s=deadline_s)
            served = [model.id for model in _Models.model_validate_json(answer).data]
        except (RequestRefused, ValidationError) as error:
            raise TeacherUnusable(
                f"no models at {self.base_url}/v1/models ({error}); check --teacher-url, and "
                "TEACHER_API_KEY if it needs a key"
            ) from error
        if self.model is None and len(served) == 1:
            self.model = served[0]
        if self.model not in served:
            wanted = "" if self.model is None else f", and not {self.model!r}"
            raise TeacherUnusable(
                f"{self.base_url} serves {', '.join(map(repr, served)) or 'no model'}{wanted}; set "
                "--teacher-model to one of them"
            )

    async def logprobs(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """[T-1] of each row: the logprobs of its tokens but the first, each given those before, at
        temperature 1.

        Args: rows: [T] token ids each, at least 2

        Raises:
            RequestRefused: for example because a row is too long.
            TeacherUnavailable, ProtocolViolation: the server's answer.
        """
        scored = await self._scored(rows)
        return [[value for value in one.token_logprobs if value is not None] for one in scored]

    async def require_same_tokenizer(self, tokenizer: Any) -> None:
        """Compare the texts of token ids: those of a sample text, special ones, and others from the
        whole vocabulary.

        Args: tokenizer: of the student, from transformers

        Raises:
            TeacherTokenizerDiffers: at least one has another text, or is unknown to the teacher.
            TeacherUnusable: the server cannot score tokens.
            TeacherUnavailable: the server's answer.
        """
        last = len(tokenizer) - 1
        spread = (round(i * last / (_PROBE_IDS - 1)) for i in range(_PROBE_IDS))
        asked = {*spread, *token_ids(tokenizer, PROBE_TEXT), *tokenizer.all_special_ids}
        texts = {token: tokenizer.decode([token]) for token in sorted(asked)}
        known = [token for token, text in texts.items() if _UNDECODABLE not in text]
        rows = [known[at : at + _IDS_PER_PROMPT] for at in range(0, len(known), _IDS_PER_PROMPT)]
        try:
            scored = await self._scored(rows)
        except RequestRefused as error:
            if "vocab" in str(error):
                raise TeacherTokenizerDiffers(self._differ(f"{error}")) from error
            raise TeacherUnusable(
                f"{error}; the server at --teacher-url must have the route /v1/completions of "
                "OpenAI's API, with prompts of token ids, echo and logprobs"
            ) from error
        except ProtocolViolation as error:
            raise TeacherUnusable(str(error)) from error
        pairs = [
            (token, text)
            for row, one in zip(rows, scored, strict=True)
            for token, text in zip(row, one.tokens, strict=True)
        ]
        wrong = [(t, text) for t, text in pairs if text.strip() != texts[t].strip()]
        if wrong:
            few = ", ".join(f"{t} {texts[t]!r} and {text!r}" for t, text in wrong[:_MAX_LISTED])
            raise TeacherTokenizerDiffers(
                self._differ(f"of {len(pairs)} token ids, {len(wrong)} have other texts: {few}")
            )

    def _differ(self, reason: str) -> str:
        return (
            f"the teacher {self.model} at {self.base_url} has another tokenizer than the student: "
            f"{reason}. Use a teacher of the same family"
        )

    async def _scored(self, rows: Sequence[list[int]]) -> list[_Logprobs]:
        """Of each row, as the server gives it for the echoed prompt."""
        body = {
            "model": self.model,
            "prompt": [*rows],
            "echo": True,
            "max_tokens": 0,
            "logprobs": 1,
            "temperature": 1.0,
        }
        answer = await self._ask("POST", "/v1/completions", json=body)
        what = f"{SERVICE} at {self.base_url}: the response from /v1/completions"
        with parsing(f"{what} is invalid"):
            choices = _Scored.model_validate_json(answer).choices
        found = [one.logprobs for one in sorted(choices, key=lambda one: one.index)]
        if problem := _problem(rows, found):
            raise ProtocolViolation(f"{what} {problem}")
        return found

    async def _ask(self, method: str, path: str, **request: Any) -> bytes:
        try:
            return (await self.send(method, path, **request)).content
        except ServiceUnavailable as error:
            raise TeacherUnavailable(str(error)) from error


def _problem(rows: Sequence[list[int]], found: Sequence[_Logprobs]) -> str | None:
    """Why the prompts' logprobs cannot be those of the rows."""
    sent, got = [len(row) for row in rows], [len(one.tokens) for one in found]
    if sent != got:
        return f"has {got} tokens for prompts of {sent}: it does not echo the prompts as they are"
    for one, count in zip(found, sent, strict=True):
        values = one.token_logprobs
        if len(values) != count or None in values[1:] or values[0] is not None:
            return "has no logprob for some token of a prompt, or one for its first token"
    return None


@dataclass(frozen=True)
class Teacher:
    """Scores what the policy said.

    Args:
        client: of its server
        template: of the student, which is the teacher's too
        system_prompt: that the teacher gets in place of the policy's; None: the same
    """

    client: TeacherClient
    template: ChatTemplate
    system_prompt: str | None = None

    async def score(self, sequences: Sequence[TrainingSequence]) -> None:
        """Set the teacher's logprobs of the sampled tokens, in one request for all sequences.

        Raises:
            GroupLost: the teacher refused the request.
            TeacherUnavailable, ProtocolViolation: its answer.
        """
        rows = [self._prompt_ids(one) + one.tokens[one.prompt_tokens :] for one in sequences]
        try:
            scored = await self.client.logprobs(rows)
        except RequestRefused as error:
            raise GroupLost(FailureReason.TEACHER_REFUSED, str(error)) from error
        for sequence, logprobs in zip(sequences, scored, strict=True):
            start = sequence.prompt_tokens
            behind = logprobs[len(logprobs) - (len(sequence.tokens) - start) :]
            pairs = zip(sequence.masks[start:], behind, strict=True)
            found = [None if mask == MASKED else logprob for mask, logprob in pairs]
            sequence.teacher_logprobs = [*[None] * start, *found]

    def _prompt_ids(self, sequence: TrainingSequence) -> list[int]:
        if self.system_prompt is None:
            return sequence.tokens[: sequence.prompt_tokens]
        prompt = with_system_prompt(sequence.prompt, self.system_prompt)
        return self.template.prompt_ids(prompt, sequence.tools)


def with_system_prompt(
    prompt: str | Sequence[Message], system_prompt: str
) -> str | Sequence[Message]:
    """The prompt with this system message in place of its own. A text without chat template follows
    it after an empty line."""
    if isinstance(prompt, str):
        return f"{system_prompt}\n\n{prompt}"
    rest = prompt[1:] if prompt and prompt[0]["role"] == "system" else prompt
    return [{"role": "system", "content": system_prompt}, *rest]
