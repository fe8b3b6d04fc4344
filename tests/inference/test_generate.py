"""`POST /generate` on a real vLLM: the answer's fields, and parameters that reach the sampler.

The tiny model's tokens 0 to 255 are bytes in the tokenizer's order: 5 is an ampersand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from grpo_core.clients.inference import GenerateAnswer
from tests.fixtures.inference import InferenceServer

PROMPT = [5, 6, 7, 8]
CONTEXT_TOKENS = 512
DEFAULTS: dict[str, Any] = {
    "prompt": {"prompt_token_ids": PROMPT},
    "max_tokens": 12,
    "logprobs": 0,
}
Answer = dict[str, Any]


def answer_to(server: InferenceServer, **body: Any) -> Answer:
    answer = httpx.post(f"{server.url}/generate", json=DEFAULTS | body)
    found: Answer = answer.raise_for_status().json()
    return found


def test_the_answer_has_the_shape_of_the_contract(shared_server: InferenceServer) -> None:
    answer = answer_to(
        shared_server, n=3, logprobs=5, prompt_logprobs=0, temperature=1.5, ignore_eos=True
    )
    assert len(answer["text"]) == len(answer["token_ids"]) == 3
    assert answer["finish_reasons"] == ["length"] * 3
    assert (answer["prompt"], answer["prompt_token_ids"]) == ("&'()", PROMPT)
    assert [entry and list(entry) for entry in answer["prompt_logprobs"]] == [
        None,
        *(["6"], ["7"], ["8"]),
    ]
    for tokens, logprobs in zip(answer["token_ids"], answer["logprobs"], strict=True):
        assert len(tokens) == len(logprobs) == 12
        for token, (alternatives,) in zip(tokens, logprobs, strict=True):
            assert next(iter(alternatives)) == str(token)  # the sampled one leads
            assert len(alternatives) in (5, 6)  # it may be among the 5 likeliest or not
            assert all(-50 < logprob <= 0 for logprob in alternatives.values())
    for first, last in answer["policy_version"]:
        assert first == last


def test_a_text_prompt_ends_at_the_stop_token(
    shared_server: InferenceServer,
) -> None:
    prompt = "<|im_start|>user\n3+4=<|im_end|>\n<|im_start|>assistant\n"
    answer = answer_to(shared_server, prompt=prompt, max_tokens=20)
    assert answer["prompt"] == prompt
    (completion,) = GenerateAnswer.model_validate(answer).completions()
    assert completion.finish_reason == "stop"
    assert len(completion.token_ids) < 20


def test_logprobs_of_the_sampled_tokens_are_the_default(shared_server: InferenceServer) -> None:
    """As for the archived server: the request of its documents has no parameter `logprobs`."""
    body = {"prompt": "Hello", "max_tokens": 5, "temperature": 0}
    sampled, *others = (
        httpx.post(f"{shared_server.url}/generate", json=body | more).json()
        for more in ({}, {"logprobs": True}, {"logprobs": False}, {"logprobs": None})
    )
    (tokens,) = sampled["token_ids"]
    assert [list(entry) for (entry,) in sampled["logprobs"][0]] == [[str(t)] for t in tokens]
    assert others[0]["logprobs"] == sampled["logprobs"]  # the likeliest token was sampled
    assert ["logprobs" in answer for answer in others] == [True, False, False]


AMPERSANDS = {"logit_bias": {"5": 100}, "ignore_eos": True}
"""Sampling parameters that always give token 5."""

EFFECTS: list[tuple[dict[str, Any], Callable[[Answer], object]]] = [
    ({"n": 4, "top_k": 1}, lambda a: (len(a["text"]), len({*a["text"]})) == (4, 1)),
    ({"max_tokens": 10**6, **AMPERSANDS}, lambda a: fills_context(a)),
    ({"stop": "&&&", **AMPERSANDS}, lambda a: (a["text"], a["finish_reasons"]) == ([""], ["stop"])),
    ({"stop_token_ids": [5], **AMPERSANDS}, lambda a: a["token_ids"] == [[5]]),
    # Alternatives with probability 0 have no finite logprob and are left out.
    ({"logprobs": 5, "top_k": 1}, lambda a: {len(e) for (e,) in a["logprobs"][0]} == {1}),
    ({"structured_outputs": {"regex": "[0-9]{3}"}}, lambda a: a["text"][0].isdigit()),
]


def fills_context(answer: Answer) -> bool:
    return len(answer["token_ids"][0]) == CONTEXT_TOKENS - len(PROMPT)


@pytest.mark.parametrize(
    ("body", "has_effect"), EFFECTS, ids=[json.dumps(body)[:50] for body, _ in EFFECTS]
)
def test_a_parameter_has_its_effect(
    shared_server: InferenceServer, body: dict[str, Any], has_effect: Callable[[Answer], object]
) -> None:
    answer = answer_to(shared_server, **body)
    assert has_effect(answer), answer
    (logprobs, *_) = answer["logprobs"]
    assert all(math.isfinite(value) for (entry,) in logprobs for value in entry.values())
