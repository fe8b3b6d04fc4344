"""atroposlib's client of the inference server gets from ours what it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.compat.upstream_processes import run_script
from tests.fixtures.inference import InferenceServer

pytestmark = pytest.mark.timeout(1800)  # the first use installs atroposlib

NOISE_NATS = 1e-4
MASKED = -100
MAX_TOKENS = 6


@pytest.fixture(scope="module")
def seen(
    upstream: Path, shared_server: InferenceServer, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    request = {"base_url": f"{shared_server.url}/v1", "model": str(shared_server.model)}
    directory = tmp_path_factory.mktemp("inference-calls")
    return run_script(upstream, "inference_calls.py", request, directory)


def test_openai_routes(seen: Any) -> None:
    assert len(seen["chat"]) == len(seen["text"]) == 3
    assert {*seen["chat"], *seen["text"]} <= {"stop", "length"}


def test_native_generation(seen: Any) -> None:
    native = seen["native"]
    assert len(native["tokens"]) == len(native["logprobs"]) == len(native["reasons"]) == 10
    assert set(native["reasons"]) <= {"stop", "length"}
    for tokens, logprobs in zip(native["tokens"], native["logprobs"], strict=True):
        assert 1 <= len(tokens) == len(logprobs) <= MAX_TOKENS
        assert max(logprobs) <= 0.0


def test_logprobs_over_two_turns_are_those_of_the_tokens(seen: Any) -> None:
    """Sampled positions of both turns, against what the server says of the same tokens."""
    sampled = [
        (logprob, scored)
        for node in seen["turns"]
        for mask, logprob, scored in zip(
            node["masked_tokens"], node["logprobs"], node["scored"], strict=True
        )
        if mask != MASKED
    ]
    assert len(sampled) >= 2
    assert max(abs(logprob - scored) for logprob, scored in sampled) < NOISE_NATS


def test_prompt_positions_are_marked(seen: Any) -> None:
    for node in seen["turns"]:
        for mask, token, logprob in zip(
            node["masked_tokens"], node["tokens"], node["logprobs"], strict=True
        ):
            assert (mask == MASKED) == (logprob == 1.0)
            assert mask in (MASKED, token)


def test_a_wrong_parameter_is_refused(seen: Any) -> None:
    assert seen["refused"] == 400
