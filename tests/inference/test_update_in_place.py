"""Weights that the running engine loads equal those of an engine that starts with them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_core.clients.inference import BridgeClient
from tests.fixtures.file_sync import serve_by_hand
from tests.fixtures.inference import FILE_MOVED, loads_in_place
from tests.support.wait import wait_for

TOKENS = [(7 * i * i + 3 * i) % 250 for i in range(60)]


def make_models(model: Path, directory: Path, tied: bool) -> list[Path]:
    """Two policies of which the second one is written in several files."""
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_pretrained(model)
    if not tied:
        policy.config.tie_word_embeddings = False
        policy.lm_head.weight = torch.nn.Parameter(policy.lm_head.weight.detach().clone())
    made = []
    for number, file_size in enumerate(("1GB", "1MB")):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        made.append(directory / f"model-{number}")
        policy.save_pretrained(made[-1], max_shard_size=file_size)
        AutoTokenizer.from_pretrained(model).save_pretrained(made[-1])
    return made


def logprobs_of(model: Path) -> torch.Tensor:
    """In float32, without a server."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logprobs = policy(torch.tensor([TOKENS])).logits[0, :-1].log_softmax(-1)
    return logprobs[torch.arange(len(TOKENS) - 1), TOKENS[1:]]


def prompt_logprobs(url: str) -> torch.Tensor:
    with BridgeClient(url) as bridge:
        return torch.tensor(bridge.prompt_logprobs(TOKENS))


@pytest.mark.parametrize(
    ("dtype", "tied"),
    [
        ("bfloat16", False),
        pytest.param("bfloat16", True, marks=pytest.mark.full),
        pytest.param("float32", False, marks=pytest.mark.full),
        pytest.param("float32", True, marks=pytest.mark.full),
    ],
)
def test_served_logprobs_equal_those_of_a_new_engine(
    dtype: str, tied: bool, tiny_model: Path, redis_url: str, tmp_path: Path
) -> None:
    first, second = make_models(tiny_model, tmp_path / "weights", tied)
    assert len(list(second.glob("*.safetensors"))) > 1
    with serve_by_hand(first, redis_url, tmp_path, [first, second], "--dtype", dtype) as served:
        before = prompt_logprobs(served.server.url)
        engine = served.server.status()["engine_pid"]
        for weights in (first, second):
            served.publish(weights)
        updated = prompt_logprobs(served.server.url)
        assert (served.server.status()["engine_pid"] == engine) is loads_in_place()
        os.kill(served.server.status()["engine_pid"], signal.SIGKILL)
        wait_for(served.server.status, lambda now: now["crashes"] == 1)
        assert torch.allclose(prompt_logprobs(served.server.url), updated, atol=1e-6)
    moved = (updated - before).abs().max()
    assert moved > FILE_MOVED
    assert (updated - logprobs_of(second)).abs().max() < moved / 4  # rounding
