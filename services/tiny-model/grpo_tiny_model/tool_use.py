"""Teaches the tiny model to call a calculator, so that GRPO can teach it to do so every time.

The questions are sums of two-digit numbers. Answered at once, they are nearly always wrong. To get
them right, the model copies the question into a call and the result of the call into its answer.
Supervised training shows both ways in equal shares, and stops early.

Legend: B rows, T tokens of the longest row, V tokens of the vocabulary.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Iterable, Iterator
from statistics import mean
from typing import TYPE_CHECKING

import structlog

from grpo_tiny_model.model import (
    BOS,
    EOS,
    IGNORE_INDEX,
    MESSAGES_TEMPLATE,
    Examples,
    Learner,
    padded,
    prompt_text,
)
from grpo_tiny_model.spec import Lessons, TinySpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

log = structlog.get_logger()

_Turns = list[tuple[str, bool]]
"""Parts of a conversation; True: the model says it."""

CALCULATOR: dict[str, object] = {
    "function": {"name": "calculator", "parameters": {"properties": {"expression": {}}}},
}
"""The part of the schema of examples/calculator.py that the chat template shows."""

CHAT_TEMPLATE = (
    "{% if tools %}"
    "{{ '<|im_start|>system\n<tools>\n' }}"
    "{% for tool in tools %}"
    "{{ tool.function.name + '(' + tool.function.parameters.properties | join(', ') + ')\n' }}"
    "{% endfor %}"
    "{{ '</tools><|im_end|>\n' }}"
    "{% endif %}"
) + MESSAGES_TEMPLATE
"""As in Hermes and Qwen, a system message shows the tools between `<tools>` tags. It shows less of
each, because the tokenizer makes one token of each byte."""

SYMBOLS = "0123456789+"
"""Of random strings."""


def teach_tool_use(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, spec: TinySpec
) -> float:
    """Train until the spec's accuracy is reached; returns the final one, in [0, 1]: how likely the
    model calls the calculator with the question and answers with its result. Direct answers that
    are right do not count."""
    lessons, drawn = spec.lessons, random.Random(spec.seed)
    attend_to_previous_tokens(model, lessons.previous_token_bias)
    learner = Learner(model, lessons.lr)
    _teach_copying(learner, tokenizer, lessons, drawn)
    sums = _sums(lessons.evaluated_sums, drawn)
    evaluated = _rows(tokenizer, [_with_call(tokenizer, f"{a}+{b}", f"{a + b}") for a, b in sums])

    def batch() -> Examples:
        return _rows(tokenizer, _conversations(tokenizer, lessons, drawn))

    return learner.teach("calling", batch, evaluated, lessons.max_call_steps, spec)


def attend_to_previous_tokens(model: PreTrainedModel, strength: float) -> None:
    """Start with heads in the first layer that attend to the token before, and to the one before
    that. Copying needs such heads; without this start it takes three times as many steps to learn.

    RoPE (arXiv 2104.09864, section 3.2.2) turns pair i of a head's d dimensions by an angle
    f_i = base^(-2i/d) for each position. If a key's bias is 0 degrees in each pair and a query's
    -offset f_i, their product is largest for a key that is `offset` positions earlier.

    Args:
        strength: length of each pair of the biases
    """
    import torch

    config, attention = model.config, model.model.layers[0].self_attn
    pairs = config.hidden_size // config.num_attention_heads // 2
    base = config.rope_parameters["rope_theta"]
    angles = base ** (-torch.arange(pairs) / pairs)  # [d/2]
    heads_per_key = config.num_attention_heads // config.num_key_value_heads
    with torch.no_grad():
        for offset in range(1, config.num_key_value_heads + 1):
            key = attention.k_proj.bias.view(-1, 2 * pairs)[offset - 1]
            query = attention.q_proj.bias.view(-1, 2 * pairs)[(offset - 1) * heads_per_key]
            key[:pairs] = strength
            query[:pairs] = strength * torch.cos(offset * angles)
            query[pairs:] = -strength * torch.sin(offset * angles)


def _teach_copying(
    learner: Learner, tokenizer: PreTrainedTokenizerFast, lessons: Lessons, drawn: random.Random
) -> None:
    """Train on random strings that are repeated twice."""
    import torch

    averaged = 20
    recent: deque[float] = deque(maxlen=averaged)
    for step in range(1, lessons.max_copy_steps + 1):
        length = drawn.randint(*lessons.string_lengths)
        strings = ["".join(drawn.choices(SYMBOLS, k=length)) for _ in range(lessons.copy_rows)]
        rows = torch.tensor([tokenizer.encode(BOS + 3 * string) for string in strings])
        labels = rows.clone()
        labels[:, : length + 1] = IGNORE_INDEX
        recent.append(learner.learn(rows, labels))
        if step % averaged == 0:
            log.info("model.taught", lesson="copying", step=step, loss=round(mean(recent), 3))
        if len(recent) == averaged and mean(recent) < lessons.copy_loss:
            break


def _conversations(
    tokenizer: PreTrainedTokenizerFast, lessons: Lessons, drawn: random.Random
) -> Iterator[_Turns]:
    for a, b in _sums(lessons.sum_rows, drawn):
        yield [(_question(tokenizer, f"{a}+{b}"), False), (f"{a + b}{EOS}", True)]
    for a, b in _sums(lessons.sum_rows, drawn):
        yield _with_call(tokenizer, f"{a}+{b}", f"{a + b}")
    for _ in range(lessons.string_rows):
        expression, result = (
            "".join(drawn.choices(SYMBOLS, k=drawn.randint(*lessons.string_lengths)))
            for _ in range(2)
        )
        yield _with_call(tokenizer, expression, result)


def _sums(count: int, drawn: random.Random) -> list[tuple[int, int]]:
    return [(drawn.randint(10, 99), drawn.randint(10, 99)) for _ in range(count)]


def _with_call(tokenizer: PreTrainedTokenizerFast, expression: str, result: str) -> _Turns:
    call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    answer = [{"role": "tool", "content": result}]
    return [
        (_question(tokenizer, expression), False),
        (f"<tool_call>{call}</tool_call>{EOS}", True),
        ("\n" + prompt_text(tokenizer, answer), False),
        (f"{result}{EOS}", True),
    ]


def _question(tokenizer: PreTrainedTokenizerFast, expression: str) -> str:
    return prompt_text(tokenizer, [{"role": "user", "content": f"{expression}="}], [CALCULATOR])


def _rows(tokenizer: PreTrainedTokenizerFast, conversations: Iterable[_Turns]) -> Examples:
    """Labels are -100 outside of what the model says."""
    rows = []
    for turns in conversations:
        encoded = [(tokenizer.encode(text), is_said) for text, is_said in turns]
        tokens = [token for ids, _ in encoded for token in ids]
        labels = [token if said else IGNORE_INDEX for ids, said in encoded for token in ids]
        rows.append((tokens, labels))
    return padded(rows, tokenizer.pad_token_id)
