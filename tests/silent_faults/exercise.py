"""The models that the faults are injected into, each with questions that it answers right at times,
and the token ids that the faults use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from transformers import AutoTokenizer

from grpo_core.settings.machine import SMOLLM2
from grpo_tiny_model.model import ensure_tiny_model
from grpo_tiny_model.smollm2 import ensure_smollm2

GROUP_SIZE = 8
FLOAT32 = "float32"
Message = dict[str, str]


@dataclass(frozen=True)
class Exercise:
    """Sums of two digits, and how a model is trained on them.

    Args:
        question: the messages of a prompt for two summands
        answer: the right answer, without white space around it
        max_tokens: limit of a completion
        cut_off_at: number of tokens of an answer with two digits, without its end token
        lr, adapter_lr: learning rates of whole models and of adapters
        server_flags: further flags of the inference server
    """

    question: Callable[[int, int], list[Message]]
    answer: Callable[[int, int], str]
    max_tokens: int
    cut_off_at: int
    groups_per_batch: int
    lr: float
    adapter_lr: float
    server_flags: tuple[str, ...] = ()

    @property
    def sequences_per_batch(self) -> int:
        return GROUP_SIZE * self.groups_per_batch

    def is_right(self, numbers: tuple[int, int], text: str) -> bool:
        return text.strip() == self.answer(*numbers)


def _worked_example(a: int, b: int) -> list[Message]:
    return [
        {"role": "user", "content": "What is 3 + 5?"},
        {"role": "assistant", "content": "3 + 5 = 8"},
        {"role": "user", "content": f"What is {a} + {b}?"},
    ]


TINY = Exercise(
    question=lambda a, b: [{"role": "user", "content": f"{a}+{b}="}],
    answer=lambda a, b: str(a + b),
    max_tokens=8,
    cut_off_at=2,
    groups_per_batch=16,
    lr=3e-4,
    adapter_lr=3e-4,
)
"""The tiny model's, with the demo's learning rate: a step moves the logprobs by about 0.02."""
CHAT = Exercise(
    question=_worked_example,
    answer=lambda a, b: f"{a} + {b} = {a + b}",
    max_tokens=12,
    cut_off_at=8,
    groups_per_batch=4,
    lr=1e-5,
    adapter_lr=6e-5,
    # A token of SmolLM2-135M takes 46 KB in float32: 30 layers x 3 heads x 64 x 2 x 4 bytes.
    server_flags=("--kv-cache-memory-bytes", str(512 * 1024 * 1024)),
)
"""A pretrained model's, with the learning rates of `grpo-demo --model`."""


@dataclass(frozen=True)
class Subject:
    """A model to inject faults into. `section`: of its table on the results page"""

    section: str
    model: Path
    exercise: Exercise
    dtype: str


def subject_of(name: str, dtype: str) -> Subject:
    """Args: name: "" for the tiny model, `smollm2`, or a directory"""
    is_smollm2 = name == SMOLLM2
    title = "SmolLM2-135M" if is_smollm2 else Path(name).resolve().name if name else ""
    section = "Measured" + (f" on {title}" if title else "")
    if dtype != FLOAT32:
        section += f" in {dtype}"
    if not name:
        return Subject(section, ensure_tiny_model(), TINY, dtype)
    model = ensure_smollm2() if is_smollm2 else Path(name)
    return Subject(section, model, CHAT, dtype)


@dataclass(frozen=True)
class TokenIds:
    """Ids of one model's tokens. `special`: tokens that are no text"""

    digits: tuple[int, ...]
    newline: int
    space: int
    pad: int
    end: int
    special: frozenset[int]
    size: int

    @classmethod
    def of(cls, tokenizer: Any) -> Self:
        one = partial(_only_token, tokenizer)
        return cls(
            digits=tuple(map(one, "0123456789")),
            newline=one("\n"),
            space=one(" "),
            pad=tokenizer.pad_token_id,
            end=tokenizer.eos_token_id,
            special=frozenset(tokenizer.added_tokens_decoder),
            size=len(tokenizer),
        )

    def other(self, token: int) -> int:
        """Another token that is text."""
        found = (token + 1) % self.size
        return found if found not in self.special else self.other(found)

    def other_digit(self, token: int) -> int:
        return self.digits[(self.digits.index(token) + 5) % len(self.digits)]


def tokenizer_of(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


def _only_token(tokenizer: Any, text: str) -> int:
    ids: Sequence[int] = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise ValueError(f"{text!r} is {len(ids)} tokens; the faults need a model with one for it")
    return ids[0]
