"""`POST /generate` against vLLM: the answer's shape, and that parameters reach the sampler.

The tiny model's tokens 0 to 255 are bytes in the tokenizer's order: 5 is an ampersand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from grpo_core.inference_client import GenerateAnswer
from tests.fixtures.inference import InferenceServer

PROMPT = [5, 6, 7, 8]
CONTEXT_TOKENS = 512
START_OF_TURN = 257
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


def test_a_text_prompt_ends_at_the_stop_token_and_comes_without_logprobs_unless_asked(
    shared_server: InferenceServer,
) -> None:
    prompt = "<|im_start|>user\n3+4=<|im_end|>\n<|im_start|>assistant\n"
    answer = answer_to(shared_server, prompt=prompt, max_tokens=20)
    assert answer["prompt"] == prompt
    (completion,) = GenerateAnswer.model_validate(answer).completions()
    assert completion.finish_reason == "stop"
    assert len(completion.token_ids) < 20
    assert "logprobs" not in answer_to(shared_server, prompt=prompt, logprobs=None)


AMPERSANDS = {"logit_bias": {"5": 100}, "ignore_eos": True}
"""Samples token 5 again and again."""
UNLIKELY_BYTES = list(range(128, 160))
"""The tiny model gives them about the same probability. Greedy decoding repeats a few of them,
sampling gives about 10 different ones in 12 tokens."""
GREEDY = {"temperature": 0, "allowed_token_ids": UNLIKELY_BYTES, "ignore_eos": True}

EFFECTS: list[tuple[dict[str, Any], Callable[[Answer], object]]] = [
    ({"n": 4, "top_k": 1}, lambda a: (len(a["text"]), len({*a["text"]})) == (4, 1)),
    ({"top_p": 1e-6, "n": 4}, lambda a: len({*a["text"]}) == 1),
    ({"max_tokens": 10**6, **AMPERSANDS}, lambda a: fills_context(a)),
    ({"stop": "&&&", **AMPERSANDS}, lambda a: (a["text"], a["finish_reasons"]) == ([""], ["stop"])),
    ({"stop_token_ids": [5], **AMPERSANDS}, lambda a: a["token_ids"] == [[5]]),
    ({"bad_words": ["&"], **AMPERSANDS}, lambda a: 5 not in a["token_ids"][0]),
    ({"allowed_token_ids": [5, 6]}, lambda a: {*a["token_ids"][0]} <= {5, 6}),
    (
        {"allowed_token_ids": [START_OF_TURN], "max_tokens": 1, "skip_special_tokens": False},
        lambda a: a["text"] == ["<|im_start|>"],
    ),
    (
        {"repetition_detection": {"max_pattern_size": 1, "min_count": 4}, **AMPERSANDS},
        lambda a: (a["finish_reasons"], a["token_ids"]) == (["repetition"], [[5] * 4]),
    ),
    # Alternatives of probability 0 have no finite log-probability and are left out.
    ({"logprobs": 5, "top_k": 1}, lambda a: {len(e) for (e,) in a["logprobs"][0]} == {1}),
    ({"structured_outputs": {"regex": "[0-9]{3}"}}, lambda a: a["text"][0].isdigit()),
    (
        {"structured_outputs": {"json": {"type": "boolean"}}},
        lambda a: json.loads(a["text"][0]) in (True, False),
    ),
    ({"extra_args": {"anything": [1]}}, lambda a: len(a["text"]) == 1),
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


@pytest.mark.parametrize("more", [{"temperature": 2.0}, {"repetition_penalty": 100.0}])
def test_warmth_and_penalties_sample_more_different_tokens(
    shared_server: InferenceServer, more: dict[str, Any]
) -> None:
    few, many = (answer_to(shared_server, **GREEDY | body)["token_ids"][0] for body in ({}, more))
    assert len({*few}) < len({*many})


def test_the_openai_routes_serve_the_same_model(shared_server: InferenceServer) -> None:
    (model,) = httpx.get(f"{shared_server.url}/v1/models").json()["data"]
    assert model["id"] == str(shared_server.model)
    chat = {"model": model["id"], "messages": [{"role": "user", "content": "1+1="}]}
    answer = httpx.post(f"{shared_server.url}/v1/chat/completions", json=chat | {"max_tokens": 4})
    assert answer.raise_for_status().json()["choices"][0]["message"]["role"] == "assistant"
