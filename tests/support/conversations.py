"""Records of rollouts from texts, with a tokenizer whose tokens are bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from grpo_core.rollouts.record import RolloutRecord

START, END = "<|im_start|>", "<|im_end|>"
SPECIAL = (256, 257)
"""Ids of `START` and `END`."""


def byte_tokenizer() -> Tokenizer:
    """A character of n bytes is n tokens, as in a byte-level BPE without merges."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: id for id, character in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(START), AddedToken(END)])
    return tokenizer


TOKENIZER = byte_tokenizer()


def conversation(*messages: tuple[str, str], **fields: Any) -> RolloutRecord:
    """Of (role, content); what the assistant said is trained on. Token n of them has the server's
    logprob -(n % 5); the trainer's is 0.25 lower for odd n.

    Args: fields: replace those of the record
    """
    tokens: list[int] = []
    mask: list[int] = []
    for role, content in messages:
        is_said = role == "assistant"
        head = TOKENIZER.encode(f"{START}{role}\n").ids
        body = TOKENIZER.encode(f"{content}{END}").ids
        tokens += head + body
        mask += [0] * len(head) + [int(is_said)] * len(body)
    server = [-float(at % 5) for at in range(sum(mask))]
    given: dict[str, Any] = {
        "messages": [{"role": role, "content": content} for role, content in messages],
        **{"tokens": tokens, "mask": mask, "behaviour_logprobs": server},
        "logprobs": [logp - 0.25 * (at % 2) for at, logp in enumerate(server)],
        **{"env_id": 0, "parts": {}, "reason": None, "completion_tokens": sum(mask)},
    }
    return record(**given | fields)


def group(
    question: str, answers: Sequence[tuple[str, float]], **fields: Any
) -> list[RolloutRecord]:
    """A group with one sequence per answer and reward; the advantage is reward - mean."""
    mean = sum(score for _, score in answers) / len(answers)
    return [
        conversation(
            ("user", question),
            ("assistant", answer),
            **{"index": index, "score": score, "advantage": score - mean} | fields,
        )
        for index, (answer, score) in enumerate(answers)
    ]


def record(**changes: Any) -> RolloutRecord:
    """Prompt 5 6, completion 7 8."""
    fields: dict[str, Any] = {
        **{"step": 1, "group": 0, "index": 0, "env_id": 3, "task": "sums", "item": "ab12"},
        "messages": [
            {"role": "user", "content": "1 + 2?"},
            {"role": "assistant", "content": "3"},
        ],
        **{"tokens": [5, 6, 7, 8], "mask": [0, 0, 1, 1]},
        **{"behaviour_logprobs": [-0.25, -1.5], "logprobs": [-0.5, -1.0]},
        **{"score": 1.0, "parts": {"accuracy": 1.0}, "reason": "equal", "advantage": 0.5},
        **{"versions": [[1, 0], [1, 0]], "staleness": 0, "finish_reason": "stop"},
        **{"temperature": 1.0, "completion_tokens": 2},
    }
    return RolloutRecord(**fields | changes)
