"""Models of the families that users bring, with real vocabularies, in every mode.

Each is published, sampled from, checked, trained for a step, exported and loaded again, or refused
in one line before its engine starts.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_core.process import ProcessFailed
from grpo_core.tree.trainer_command import CommandLine
from grpo_trainer.checks.served_weights import PublicationCheck
from grpo_trainer.model.adapter import trained_parameters
from grpo_trainer.model.loading import TrainedWeights
from grpo_trainer.model.logprobs import logprobs_of, sampled_tokens
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.weight_sync.base import WeightSync
from grpo_trainer.weight_sync.build import build_weight_sync
from tests.fixtures.adapters import load
from tests.fixtures.inference import FLOAT32_NOISE, InferenceServer, start_inference, stop_inference
from tests.inference.request_load import load_on
from tests.support.shapes import SHAPES, Shape

SHARED, LORA, LORA_RESTART, NONE = MODES = ("shared_vllm", "lora_only", "lora_restart", "none")
LR = 1e-2
NO_ADAPTER = "vLLM cannot serve a model of class GPT2LMHeadModel with an adapter"
NO_EXPERTS = "on a CPU, vLLM cannot serve a mixture of experts with an adapter"
REFUSED = {
    ("GPT-2", SHARED): "c_attn.weight: not loaded from the model's files",
    ("GPT-2", LORA): NO_ADAPTER,
    ("GPT-2", LORA_RESTART): NO_ADAPTER,
    ("Qwen3 MoE", SHARED): "mixture of experts (4): the server rearranges the experts' weights",
    ("Qwen3 MoE", LORA): NO_EXPERTS,
    ("Qwen3 MoE", LORA_RESTART): NO_EXPERTS,
}
"""Words of the server's refusal, by shape and mode."""
IN_MAKE_TEST = {("Llama", LORA), ("GPT-2", LORA)}
CASES = [
    pytest.param(name, mode, marks=() if (name, mode) in IN_MAKE_TEST else pytest.mark.full)
    for name in SHAPES
    for mode in MODES
]


def server_flags(mode: str, redis_url: str, directory: Path) -> tuple[str, ...]:
    flags = ("--dtype", "float32", "--redis-url", redis_url, "--run-id", uuid.uuid4().hex)
    if mode == SHARED:
        return flags
    weights = directory / "saved" / "served_weights"
    weights.mkdir(parents=True)
    return (
        *flags,
        "--weights-dir",
        str(weights),
        *(["--enable-lora"] if mode in (LORA, LORA_RESTART) else []),
    )


@contextmanager
def synced(
    shape: Shape, model: Path, mode: str, redis_url: str, directory: Path
) -> Iterator[tuple[WeightSync, InferenceServer]]:
    """A server that serves this model in this mode, and the trainer's side of it."""
    flags = server_flags(mode, redis_url, directory)
    server = start_inference(model, directory, *flags, shares=mode == SHARED)
    options: dict[str, Any] = {"redis_url": redis_url}
    if mode == SHARED:
        options = {"weights_socket": server.socket}
    elif mode in (LORA, LORA_RESTART):
        options["lora_target_modules"] = shape.adapted
    if mode in (LORA_RESTART, NONE):
        options["vllm_restart_interval"] = 1
    settings = CommandLine(
        model=str(model),
        mode=mode,
        inference_url=server.url,
        save_path=directory / "saved",
        **options,
    ).settings()
    sync = build_weight_sync(settings)
    try:
        yield sync, server
    finally:
        sync.close()
        stop_inference(server)


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_a_step_is_served_exported_and_loaded_again(
    name: str, mode: str, redis_url: str, tmp_path: Path
) -> None:
    shape = SHAPES[name]
    model = shape.save(tmp_path / "model")
    if (name, mode) in REFUSED:
        require_refusal(model, mode, redis_url, tmp_path, REFUSED[name, mode])
        return
    with synced(shape, model, mode, redis_url, tmp_path) as (sync, server):
        policy = sync.load_policy().eval()
        optimizer = MasterOptimizer(trained_parameters(policy).values(), lambda _: LR, 0.0, 1.0)
        sync.start(optimizer, 0)
        check = PublicationCheck(policy, sync)
        assert check.measure().max < FLOAT32_NOISE
        ids = torch.randint(200, (4, 40), generator=torch.Generator().manual_seed(0))
        policy(ids, labels=ids).loss.backward()  # type: ignore[operator]
        # The check of the served weights shares passes with these requests.
        with load_on(server.url, clients=4) as report:
            report.wait_for_answers(3)
            optimizer.step(0)
            sync.publish(optimizer, 1)
            after = check.measure()
        assert report.problems == []
        assert server.status()["crashes"] == 0
        assert after.max < FLOAT32_NOISE
        assert after.moved > 100 * FLOAT32_NOISE
        exported = tmp_path / "exported"
        lora = CommandLine(model=str(model), mode=mode, redis_url=redis_url).settings().lora
        TrainedWeights(str(model), lora).write(policy, exported, with_tokenizer=True)
        tokens = sampled_tokens(policy)
        again = load(model, exported)
        assert torch.equal(logprobs_of(again, tokens), logprobs_of(policy, tokens))


def require_refusal(model: Path, mode: str, redis_url: str, directory: Path, why: str) -> None:
    flags = server_flags(mode, redis_url, directory)
    with pytest.raises(ProcessFailed):
        start_inference(model, directory, *flags, shares=mode == SHARED)
    assert why in (directory / "vllm-server.log").read_text()
