"""Options of `env-server` for a teacher, which scores the policy's tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, SecretStr, field_validator

from grpo_core.security import usable_token
from grpo_core.settings import HttpUrl, Mistake, Shown

_PLAIN = {"temperature": 1, "top_p": 1, "top_k": 0, "repetition_penalty": 1}


class TeacherOptions(BaseModel):
    """On-policy distillation."""

    teacher_url: Annotated[HttpUrl | None, Shown(default="none")] = Field(
        None,
        description="URL of a teacher's server, for on-policy distillation: the teacher's logprobs "
        "of the sampled tokens become part of each group. The server has /v1/completions of "
        "OpenAI's API with echo and logprobs: vllm-api-server, vLLM or another. The trainer needs "
        "--objective distill or --distill-coef",
    )
    teacher_model: Annotated[str | None, Shown(default="the only model of --teacher-url")] = Field(
        None,
        min_length=1,
        description="Name under which the teacher's server serves the teacher. It needs the "
        "tokenizer of --model",
    )
    teacher_api_key: SecretStr | None = Field(
        None, description="API key that the teacher's server requires"
    )
    teacher_system_prompt: Annotated[str | None, Shown(metavar="TEXT|@FILE")] = Field(
        None,
        min_length=1,
        description="System message that the teacher gets in place of the policy's, so that the "
        "policy learns to answer as if it had it (context distillation). @FILE: the text of a file",
    )

    _usable_key = field_validator("teacher_api_key")(usable_token)

    @property
    def teacher_prompt(self) -> str | None:
        """The text of --teacher-system-prompt."""
        given = self.teacher_system_prompt
        if given is None or not given.startswith("@"):
            return given
        return Path(given[1:]).expanduser().read_text(encoding="utf-8").strip()

    def teacher_mistakes(self) -> Iterator[Mistake]:
        """Options that do not fit together."""
        if self.teacher_url is None:
            for name in ("teacher_model", "teacher_system_prompt"):
                if getattr(self, name) is not None:
                    yield Mistake(name, "has no effect without --teacher-url")
            return
        for name, plain in _PLAIN.items():
            if getattr(self, name) != plain:
                problem = "does not fit --teacher-url: the teacher's logprobs are those of plain"
                yield Mistake(name, f"{problem} sampling at temperature 1; pass {plain}")

    def teacher_prompt_mistakes(self) -> Iterator[Mistake]:
        """Of a start on this machine."""
        try:
            _ = self.teacher_prompt
        except (OSError, UnicodeDecodeError) as error:
            yield Mistake("teacher_system_prompt", f"cannot be read: {error}")
