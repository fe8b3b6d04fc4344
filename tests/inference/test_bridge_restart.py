"""After a server is killed during a run, no request is answered with its checkpoint."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from grpo_core.clients.inference import GenerateAnswer
from grpo_core.wire.policy_version import PolicyVersion
from grpo_runs.process.ports import free_port
from grpo_trainer.model.logprobs import probe_tokens
from tests.fixtures.inference import (
    FLOAT32_NOISE,
    START_DEADLINE_S,
    InferenceServer,
    launch_inference,
    stop_inference,
)
from tests.inference.memory_maps import holds_weights
from tests.inference.trainer_side import write_weights
from tests.support.wait import wait_for

VERSION = PolicyVersion(1, 3)
PROBE = probe_tokens(259)
LONG_STREAM = {
    "prompt": {"prompt_token_ids": [5, 6]},
    **{"max_tokens": 500, "n": 60, "ignore_eos": True, "stream": True},
}


@contextmanager
def server_of(
    model: Path, directory: Path, redis_url: str, run_id: str, port: int
) -> Iterator[InferenceServer]:
    """A server that has started but may not listen yet."""
    server = launch_inference(
        model,
        directory,
        *("--dtype", "float32", "--redis-url", redis_url, "--run-id", run_id),
        *("--write-back-hold-s", "120"),
        port=port,
    )
    try:
        yield server
    finally:
        stop_inference(server)


def state_of(server: InferenceServer) -> tuple[str, list[int]] | None:
    """None while the server does not answer."""
    try:
        info = httpx.get(f"{server.url}/bridge/info").raise_for_status().json()
    except httpx.HTTPError:
        return None
    return info["state"], info["policy_version"]


def wait_for_state(server: InferenceServer, state: str, version: list[int]) -> None:
    server.process.wait_until(lambda: state_of(server) == (state, version), START_DEADLINE_S)


def probe(url: str) -> GenerateAnswer:
    """Logprobs of fixed tokens. The request is repeated until the server listens."""
    body = {"prompt": {"prompt_token_ids": PROBE}, "max_tokens": 1}
    body |= {"prompt_logprobs": 0, "logprobs": 0, "temperature": 0}

    def ask() -> httpx.Response | None:
        with contextlib.suppress(httpx.ConnectError):
            return httpx.post(f"{url}/generate", json=body, timeout=START_DEADLINE_S)
        return None

    answer = wait_for(ask, lambda found: found is not None, START_DEADLINE_S)
    assert answer is not None
    return GenerateAnswer.model_validate(answer.raise_for_status().json())


def logprobs_in(answer: GenerateAnswer) -> torch.Tensor:
    entries = (answer.prompt_logprobs or [])[1:]
    return torch.tensor([(e or {})[t] for t, e in zip(PROBE[1:], entries, strict=True)])


def lines_until_broken(
    server: InferenceServer, break_it: Callable[[], None]
) -> list[dict[str, Any]]:
    """The lines of a stream that breaks after its first line. The client must detect that."""
    lines: list[dict[str, Any]] = []

    def read() -> None:
        with httpx.stream("POST", f"{server.url}/generate", json=LONG_STREAM) as response:
            for line in response.iter_lines():
                if not lines:
                    break_it()
                lines.append(json.loads(line))

    with pytest.raises(httpx.TransportError):
        read()
    assert all("finish_reasons" not in line for line in lines)
    return lines


def test_a_killed_server_answers_from_the_weights_that_were_written_back_and_no_others(
    tiny_model: Path, tmp_path: Path, redis_url: str
) -> None:
    run_id, port = uuid.uuid4().hex, free_port()
    with server_of(tiny_model, tmp_path, redis_url, run_id, port) as first:
        wait_for_state(first, "serving", [0, 0])  # the run has not served any weights yet
        checkpoint = logprobs_in(probe(first.url))
        trained = write_weights(first, VERSION, noise=0.02)
        served = logprobs_in(probe(first.url))
        assert (served - checkpoint).abs().max() > 0.5
        lines_until_broken(first, first.process.kill)

    with (
        ThreadPoolExecutor(1) as pool,
        server_of(tiny_model, tmp_path, redis_url, run_id, port) as second,
    ):
        held = pool.submit(probe, second.url)  # long before the server listens
        wait_for_state(second, "awaiting_weights", [1, 3])
        for route, status, says in (
            ("/health", 503, "waiting for a trainer to write policy version [1, 3] back"),
            ("/health_generate", 503, ""),
            ("/v1/models", 200, ""),
        ):
            answer = httpx.get(f"{second.url}{route}")
            assert answer.status_code == status
            assert says in answer.text
        write_weights(second, VERSION, trained)
        answer_held = held.result(START_DEADLINE_S)
        assert answer_held.completions()[0].first_version == VERSION
        assert (logprobs_in(answer_held) - served).abs().max() < FLOAT32_NOISE
        assert httpx.get(f"{second.url}/health").status_code == 200
        assert state_of(second) == ("serving", [1, 3])

        engine = psutil.Process(second.status()["engine_pid"])
        (worker,) = [each for each in engine.children() if holds_weights(each.pid)]
        lines = lines_until_broken(second, worker.kill)
        assert set(lines[-1]) == {"error"}
        # The supervisor starts another engine, which needs the weights to be written back again.
        wait_for_state(second, "awaiting_weights", [1, 3])
        assert second.status()["crashes"] == 1
    assert not second.bridge_config.exists()
