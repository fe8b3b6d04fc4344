"""Every sampling parameter of vLLM over `POST /generate`: what it does, and what is refused.

The tiny model's tokens 0 to 255 are bytes in the tokenizer's order: 15 to 24 are the digits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.fixtures.inference import InferenceServer

DIGITS = list(range(15, 25))
START_OF_TURN, END_OF_TURN = 257, 258
DEFAULTS: dict[str, Any] = {
    "prompt": {"prompt_token_ids": [5, 6, 7, 8]},
    "max_tokens": 12,
    "logprobs": 0,
}
Answer = dict[str, Any]


def post(server: InferenceServer, **body: Any) -> httpx.Response:
    content = json.dumps(DEFAULTS | body)
    return httpx.post(f"{server.url}/generate", content=content, timeout=60)


def answer_to(server: InferenceServer, **body: Any) -> Answer:
    answer: Answer = post(server, **body).raise_for_status().json()
    for tokens, logprobs in zip(answer["token_ids"], answer["logprobs"], strict=True):
        assert len(tokens) == len(logprobs)
        assert all(math.isfinite(v) for (entry,) in logprobs for v in entry.values())
    return answer


def tokens_of(answer: Answer) -> list[int]:
    return [token for completion in answer["token_ids"] for token in completion]


ALWAYS_5 = {"logit_bias": {"5": 100}, "ignore_eos": True}
"""Samples token 5, an ampersand, again and again."""

HARDLY_TOLD_APART = {"allowed_token_ids": list(range(128, 160)), "ignore_eos": True}
"""Bytes of no text that the tiny model has seen: it gives them about the same probability. Greedy
decoding repeats a few of them, sampling gives about 10 different ones in 12 tokens."""
GREEDY = {"temperature": 0, **HARDLY_TOLD_APART}

FEWER_THAN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (GREEDY, {"temperature": 2.0, **HARDLY_TOLD_APART}),
    (GREEDY, {"presence_penalty": 2.0, **GREEDY}),
    (GREEDY, {"frequency_penalty": 2.0, **GREEDY}),
    # Makes up for the other penalty.
    (
        {"frequency_penalty": -2.0, "presence_penalty": 2.0, **GREEDY},
        {"presence_penalty": 2.0, **GREEDY},
    ),
    (GREEDY, {"repetition_penalty": 100.0, **GREEDY}),
]
"""Parameters of which the first sample fewer different tokens than the second."""

EFFECTS: list[tuple[dict[str, Any], Callable[[Answer], bool]]] = [
    ({"n": 3}, lambda a: len(a["text"]) == 3),
    ({"temperature": 2.0, "ignore_eos": True}, lambda a: len(a["token_ids"][0]) == 12),
    ({"top_k": 1, "n": 4}, lambda a: len(set(a["text"])) == 1),
    ({"top_p": 1e-6, "n": 4}, lambda a: len(set(a["text"])) == 1),
    ({"min_p": 1.0, "n": 4}, lambda a: len(set(a["text"])) == 1),
    ({"max_tokens": None, **ALWAYS_5}, lambda a: len(a["token_ids"][0]) == 512 - 4),
    ({"max_tokens": 10**6, **ALWAYS_5}, lambda a: len(a["token_ids"][0]) == 512 - 4),
    (
        {"min_tokens": 12, "allowed_token_ids": [5, END_OF_TURN]},
        lambda a: tokens_of(a) == [5] * 12,
    ),
    ({"ignore_eos": True, "n": 8}, lambda a: a["finish_reasons"] == ["length"] * 8),
    (
        {"stop": "&&&", **ALWAYS_5},
        lambda a: (a["text"], a["finish_reasons"], tokens_of(a)) == ([""], ["stop"], [5] * 3),
    ),
    ({"stop": ["x", "&&"], **ALWAYS_5}, lambda a: a["text"] == [""]),
    (
        {"stop": ["&&"], "include_stop_str_in_output": True, **ALWAYS_5},
        lambda a: a["text"] == ["&&"],
    ),
    ({"stop_token_ids": [5], **ALWAYS_5}, lambda a: tokens_of(a) == [5]),
    ({"bad_words": ["&"], **ALWAYS_5}, lambda a: 5 not in tokens_of(a)),
    (ALWAYS_5, lambda a: a["text"] == ["&" * 12]),
    ({"logit_bias": {str(t): -100 for t in DIGITS}}, lambda a: not {*DIGITS} & {*tokens_of(a)}),
    ({"allowed_token_ids": [5, 6], "n": 8}, lambda a: {*tokens_of(a)} <= {5, 6}),
    (
        {"allowed_token_ids": [START_OF_TURN], "max_tokens": 1, "skip_special_tokens": True},
        lambda a: a["text"] == [""],
    ),
    (
        {"allowed_token_ids": [START_OF_TURN], "max_tokens": 1, "skip_special_tokens": False},
        lambda a: a["text"] == ["<|im_start|>"],
    ),
    ({"spaces_between_special_tokens": False}, lambda a: len(a["text"]) == 1),
    (
        {"repetition_detection": {"max_pattern_size": 1, "min_count": 4}, **ALWAYS_5},
        lambda a: (a["finish_reasons"], tokens_of(a)) == (["repetition"], [5] * 4),
    ),
    ({"logprobs": 3}, lambda a: {len(e) for (e,) in a["logprobs"][0]} <= {3, 4}),
    (
        {"prompt_logprobs": 2, "n": 2},
        lambda a: [e is None for e in a["prompt_logprobs"]] == [True, False, False, False],
    ),
    ({"skip_reading_prefix_cache": True}, lambda a: len(a["text"]) == 1),
    ({"thinking_token_budget": -1}, lambda a: len(a["text"]) == 1),
    ({"routed_experts_prompt_start": 1}, lambda a: len(a["text"]) == 1),
    ({"stream_interval": 5}, lambda a: len(a["text"]) == 1),
    ({"extra_args": {"anything": [1, {"at": "all"}]}}, lambda a: len(a["text"]) == 1),
    ({"structured_outputs": {"regex": "[0-9]{3}"}}, lambda a: len(a["text"][0]) == 3),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda a: a["text"][0] in ("yes", "no")),
    (
        {"structured_outputs": {"grammar": 'root ::= "a" | "b"'}},
        lambda a: a["text"][0] in ("a", "b"),
    ),
    (
        {"structured_outputs": {"json": {"type": "boolean"}}},
        lambda a: json.loads(a["text"][0]) in (True, False),
    ),
    ({"structured_outputs": {"json_object": True}}, lambda a: a["text"][0].startswith("{")),
]


@pytest.mark.parametrize(
    ("body", "has_effect"), EFFECTS, ids=[json.dumps(body)[:60] for body, _ in EFFECTS]
)
def test_a_parameter_does_what_it_says(
    shared_server: InferenceServer, body: dict[str, Any], has_effect: Callable[[Answer], bool]
) -> None:
    answer = answer_to(shared_server, **body)
    assert has_effect(answer), answer


@pytest.mark.parametrize(
    ("fewer", "more"), FEWER_THAN, ids=[json.dumps(more)[:60] for _, more in FEWER_THAN]
)
def test_a_parameter_changes_how_many_different_tokens_there_are(
    shared_server: InferenceServer, fewer: dict[str, Any], more: dict[str, Any]
) -> None:
    few, many = (tokens_of(answer_to(shared_server, **body)) for body in (fewer, more))
    assert len({*few}) < len({*many}), (few, many)


def test_the_tables_leave_no_parameter_out(shared_server: InferenceServer) -> None:
    """A parameter that a new version of vLLM brings shows up here."""
    used = {name for body, _ in EFFECTS for name in body} | {n for _, n in REFUSED}
    used |= {name for _, body in FEWER_THAN for name in body}
    assert used >= known_parameters(shared_server)


def known_parameters(server: InferenceServer) -> set[str]:
    """As the server says itself: every field of `SamplingParams`."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of vLLM's own dependencies
        from grpo_vllm.engine_internals import SamplingParams
    assert server
    return {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}


DEEP: list[Any] = []
for _ in range(100):
    DEEP = [DEEP]

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"n": 1025}, "n"),
    ({"n": 2, "temperature": 0}, "n"),
    ({"seed": 1}, "seed"),
    ({"output_kind": 2}, "output_kind"),
    ({"detokenize": False}, "detokenize"),
    ({"flat_logprobs": True}, "flat_logprobs"),
    ({"skip_clone": True}, "skip_clone"),
    ({"output_text_buffer_length": 5}, "output_text_buffer_length"),
    ({"prompt_logprob_token_ids": [[1]]}, "prompt_logprob_token_ids"),
    ({"prompt_logprob_start": 1}, "prompt_logprob_start"),
    ({"watermarking": True}, "watermarking"),
    ({"trace_decode_token_ids": [5]}, "trace_decode_token_ids"),
    ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ({"stream_interval": 0}, "stream_interval"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 10**30}, "top_k"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"min_tokens": 13}, "min_tokens"),
    ({"min_p": 2}, "min_p"),
    ({"temperature": None}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-30}, "repetition_penalty"),
    ({"repetition_penalty": 1e38}, "repetition_penalty"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop_token_ids": [99999]}, "stop_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": [f"x{i}" for i in range(1000)]}, "bad_words"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1e39}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"logprobs": 21}, "logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"logprob_token_ids": [1], "logprobs": 1}, "logprob_token_ids"),
    ({"logprob_token_ids": []}, "logprob_token_ids"),
    ({"prompt_logprobs": 0, "skip_reading_prefix_cache": False}, "skip_reading_prefix_cache"),
    ({"routed_experts_prompt_start": -1}, "routed_experts_prompt_start"),
    ({"repetition_detection": {"max_pattern_size": -1}}, "max_pattern_size"),
    ({"repetition_detection": {"pattern": 1}}, "repetition_detection: unknown fields pattern"),
    ({"extra_args": {"deep": DEEP}}, "extra_args"),
    ({"structured_outputs": {}}, "structured outputs"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "_backend": "x"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured outputs"),
    ({"structured_outputs": {"grammar": "root ::= root"}}, "structured_outputs"),
    ({"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs"),
    ({"structured_outputs": {"json": {"items": DEEP}}}, "structured_outputs"),
    ({"structured_outputs": {"choice": ["x" * 1000] * 17}}, "structured_outputs: 17"),
    (
        {"structured_outputs": {"choice": ["a"]}, "allowed_token_ids": [5]},
        "allowed_token_ids, structured_outputs: these constraints leave no token",
    ),
    ({"allowed_token_ids": [65], "bad_words": ["b"]}, "leave no token"),
    ({"stop": ["\ud800"]}, "surrogate"),
    ({"prompt": {"prompt_token_ids": [1], "multi_modal_data": {}}}, "prompt"),
    ({"prompt": "x" * 100_000}, "prompt: 100000 characters"),
    ({"stream": "yes"}, "stream"),
]


@pytest.mark.parametrize(
    ("body", "named"), REFUSED, ids=[json.dumps(body)[:60] for body, _ in REFUSED]
)
def test_what_cannot_work_is_a_4xx_that_names_it(
    shared_server: InferenceServer, body: dict[str, Any], named: str
) -> None:
    answer = post(shared_server, **body)
    assert answer.status_code == 400, answer.text
    assert named in answer.json()["detail"]


def test_several_mistakes_are_named_at_once(shared_server: InferenceServer) -> None:
    detail = post(shared_server, n=0, best_of=3, watermarking=True).json()["detail"]
    assert all(name in detail for name in ("n:", "best_of", "watermarking"))


def test_a_body_beyond_the_limit_is_refused(shared_server: InferenceServer) -> None:
    answer = httpx.post(f"{shared_server.url}/generate", content=b" " * 17 * 2**20, timeout=60)
    assert answer.status_code == 413


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_a_seed_does_not_end_the_engine_on_any_route(
    shared_server: InferenceServer, route: str
) -> None:
    """vLLM itself takes it on CPU, and dies as soon as a prefill is chunked or recomputed."""
    body = {"model": str(shared_server.model), "seed": 1, "max_tokens": 2}
    body |= {"prompt": "1"} if route == "completions" else {"messages": CHAT}
    answer = httpx.post(f"{shared_server.url}/v1/{route}", json=body, timeout=60)
    assert answer.status_code == 400
    assert "seed: not supported per request on CPU" in answer.text


CHAT = [{"role": "user", "content": "1+1="}]
