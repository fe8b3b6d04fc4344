"""A server that is killed in the middle of a run: nobody is answered from its checkpoint."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from grpo_core.inference_client import BridgeClient, GenerateAnswer
from grpo_core.weight_socket import connect_weights
from grpo_core.wire import PolicyVersion
from grpo_local.ports import free_port
from grpo_trainer.alignment import probe_tokens
from grpo_trainer.weight_sync.mapped_memory import map_memory
from grpo_trainer.weight_sync.shared_views import MappedWeights
from tests.fixtures.inference import (
    START_DEADLINE_S,
    InferenceServer,
    launch_inference,
    stop_inference,
)

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
    server = launch_inference(
        model,
        directory,
        *("--dtype", "float32"),
        *("--redis-url", redis_url),
        *("--run-id", run_id),
        *("--write-back-hold-s", "120"),
        port=port,
    )
    try:
        yield server
    finally:
        stop_inference(server)


def is_listening(server: InferenceServer) -> bool:
    try:
        return httpx.get(f"{server.url}/bridge/info", timeout=2.0).is_success
    except httpx.TransportError:
        return False


def publish(
    server: InferenceServer, version: PolicyVersion, weights: list[torch.Tensor] | None
) -> list[torch.Tensor]:
    """What a trainer does: every parameter is written, `weights` or else moved ones. Returns a
    copy of what is there then."""
    with BridgeClient(server.url) as bridge, connect_weights(server.socket) as connection:
        mapped = MappedWeights(connection.grant.manifest, map_memory(connection))
        regions = {r.offset: r for r in mapped.manifest.parameters.values()}  # tied ones once
        views = [mapped.view(region) for region in regions.values()]
        session = connection.grant.session
        bridge.pause(session, 30.0, version)
        generator = torch.Generator().manual_seed(0)
        for index, view in enumerate(views):
            if weights is None:
                view += 0.02 * torch.randn(view.shape, generator=generator).to(view)
            else:
                view.copy_(weights[index])
        mapped.wait_until_written()
        bridge.resume(session, written=True)
        return [view.clone() for view in views]


def probe(url: str, deadline_s: float) -> GenerateAnswer:
    """Log-probabilities of fixed tokens, asked again and again until the server can be reached."""
    body = {"prompt": {"prompt_token_ids": PROBE}, "max_tokens": 1}
    body |= {"prompt_logprobs": 0, "logprobs": 0, "temperature": 0}
    give_up_at = time.monotonic() + deadline_s
    while True:
        try:
            answer = httpx.post(f"{url}/generate", json=body, timeout=START_DEADLINE_S)
            return GenerateAnswer.model_validate(answer.raise_for_status().json())
        except httpx.ConnectError:
            assert time.monotonic() < give_up_at, f"nothing listened within {deadline_s} s"
            time.sleep(0.05)


def logprobs_in(answer: GenerateAnswer) -> torch.Tensor:
    entries = (answer.prompt_logprobs or [])[1:]
    return torch.tensor([(e or {})[t] for t, e in zip(PROBE[1:], entries, strict=True)])


def broken_stream(server: InferenceServer, break_it: Any) -> list[dict[str, Any]]:
    """The lines of a stream that is broken in the middle; the client must notice."""
    lines: list[dict[str, Any]] = []
    with pytest.raises(httpx.TransportError):
        read_stream(server, lines, break_it)
    assert all("finish_reasons" not in line for line in lines)
    return lines


def read_stream(server: InferenceServer, lines: list[dict[str, Any]], break_it: Any) -> None:
    url = f"{server.url}/generate"
    with httpx.stream("POST", url, json=LONG_STREAM, timeout=60) as response:
        for line in response.iter_lines():
            if not lines:
                break_it()
            lines.append(json.loads(line))


def kill_engine(server: InferenceServer) -> None:
    (engine,) = [
        child
        for child in psutil.Process(server.process.pid).children(recursive=True)
        if "EngineCore" in " ".join(child.cmdline())
    ]
    engine.kill()


@pytest.mark.timeout(600)
def test_a_killed_server_answers_from_the_weights_that_were_written_back_and_no_others(
    tiny_model: Path, tmp_path: Path, redis_url: str
) -> None:
    run_id, port = uuid.uuid4().hex, free_port()
    with server_of(tiny_model, tmp_path, redis_url, run_id, port) as first:
        first.process.wait_until(lambda: is_listening(first), START_DEADLINE_S)
        assert state_of(first) == ("serving", [0, 0])  # a run that was served nothing yet
        checkpoint = logprobs_in(probe(first.url, 10.0))
        trained = publish(first, VERSION, None)
        served = logprobs_in(probe(first.url, 10.0))
        assert (served - checkpoint).abs().max() > 0.5
        broken_stream(first, first.process.kill)  # SIGKILL, its engine too

    with (
        ThreadPoolExecutor(1) as pool,
        server_of(tiny_model, tmp_path, redis_url, run_id, port) as second,
    ):
        held = pool.submit(probe, second.url, START_DEADLINE_S)  # long before it listens
        second.process.wait_until(lambda: is_listening(second), START_DEADLINE_S)
        assert state_of(second) == ("awaiting_weights", [1, 3])
        health = httpx.get(f"{second.url}/health")
        assert health.status_code == 503
        assert "waiting for a trainer to write policy version [1, 3] back" in health.text
        assert httpx.get(f"{second.url}/health_generate").status_code == 503
        assert httpx.get(f"{second.url}/v1/models").status_code == 200
        time.sleep(0.5)
        assert not held.done()
        publish(second, VERSION, trained)
        answer = held.result(timeout=120.0)
        assert answer.completions()[0].first_version == VERSION
        assert (logprobs_in(answer) - served).abs().max() < 1e-4
        assert httpx.get(f"{second.url}/health").status_code == 200
        assert state_of(second) == ("serving", [1, 3])
        assert (
            "replacing the bridge config of another server" in second.process.log_path.read_text()
        )

        lines = broken_stream(second, lambda: kill_engine(second))
        assert "error" in lines[-1]
        assert "text" not in lines[-1]
        # Its supervisor lives on; the engine that it starts waits for the weights again.
        second.process.wait_until(lambda: is_awaiting_weights(second), START_DEADLINE_S)
        assert second.status()["crashes"] == 1
    assert not second.bridge_config.exists()


def is_awaiting_weights(server: InferenceServer) -> bool:
    try:
        return state_of(server)[0] == "awaiting_weights"
    except httpx.HTTPError:  # the one that was killed, or nobody yet
        return False


def state_of(server: InferenceServer) -> tuple[str, list[int]]:
    info = httpx.get(f"{server.url}/bridge/info").raise_for_status().json()
    return info["state"], info["policy_version"]


def test_a_redis_that_cannot_be_asked_stops_the_start(tiny_model: Path, tmp_path: Path) -> None:
    """Rather than serving a checkpoint that may be older than the run."""
    redis_url = f"redis://127.0.0.1:{free_port()}/0"
    server = launch_inference(
        tiny_model, tmp_path, *("--redis-url", redis_url), *("--redis-deadline-s", "0.5")
    )
    try:
        assert server.process.wait(START_DEADLINE_S) == 1
        log = server.process.log_path.read_text()
        assert "RedisUnreachable" in log
        assert f"Redis at {redis_url} did not answer within 0.5 s" in log
    finally:
        stop_inference(server)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--redis-url", "localhost"], "--redis-url: Value error, expected redis://host"),
        (["--write-back-hold-s", "0"], "--write-back-hold-s: Input should be greater than 0"),
    ],
)
def test_options_that_cannot_be_right(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from grpo_vllm.__main__ import main

    with pytest.raises(SystemExit) as ended:
        main(["--model", "m", *words])
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err
