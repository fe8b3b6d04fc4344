"""After every update the server serves the trainer's weights, from one copy in memory. Only checks
after a step prove this, because the negative controls pass the checks before it.
"""

from __future__ import annotations

import gc
from pathlib import Path

import httpx
import pytest
import torch

from grpo_core.clients.inference import BridgeClient, GenerateAnswer
from grpo_core.weights.shared_memory import TensorRegion
from grpo_runs.process.ports import free_port
from grpo_tiny_model.model import build_model, build_tokenizer
from grpo_tiny_model.spec import TinySpec
from grpo_trainer.errors import MovedParameters, PolicyMismatch, ServedWeightsDiffer
from grpo_trainer.model.logprobs import probe_tokens
from grpo_trainer.weight_sync.attachment import ServerConnection
from grpo_trainer.weight_sync.shared import SharedVllm
from tests.fixtures.adapters import logprobs
from tests.fixtures.inference import (
    FLOAT32_NOISE,
    START_DEADLINE_S,
    InferenceServer,
    launch_inference,
    start_inference,
    stop_inference,
)
from tests.inference.memory_maps import weight_mappings
from tests.inference.trainer_side import (
    FLIGHT_TOKENS,
    FLIGHTS,
    AttachedTrainer,
    attached_trainer,
    update_in_flight,
)
from tests.negative_controls.grpo_negative_controls import control_plugin

STEPS = 3

ON_CPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="of memory and layers on the host; of a GPU: tests/gpu"
)


def sampled_difference(trainer: AttachedTrainer, prompt: list[int]) -> float:
    """Largest |server's - trainer's| logprob over newly sampled tokens."""
    completion = trainer.bridge.sample(prompt, max_tokens=24, temperature=0.7, ignore_eos=True)
    ours = logprobs(trainer.policy, prompt, completion.token_ids, 0.7)
    return largest_difference(completion.logprobs, ours.tolist())


def largest_difference(some: list[float], others: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(some, others, strict=True))


def test_after_every_step_the_server_serves_the_trainers_weights(
    shared_server: InferenceServer,
) -> None:
    """This holds for new prompts, and for one in the KV cache."""
    with attached_trainer(shared_server) as trainer:
        before = trainer.sync.served_logprobs(trainer.tokens)
        cached = probe_tokens(trainer.policy.config.vocab_size, length=400)
        assert sampled_difference(trainer, cached) < FLOAT32_NOISE
        for step in range(STEPS):
            trainer.step(step)
            assert trainer.alignment().max < FLOAT32_NOISE
            assert sampled_difference(trainer, trainer.tokens[:12]) < FLOAT32_NOISE
            assert sampled_difference(trainer, cached) < FLOAT32_NOISE
        after = trainer.sync.served_logprobs(trainer.tokens)
        assert largest_difference(after, before) > 0.5, "the steps moved nothing: nothing is proven"


def test_requests_in_flight_go_on_under_the_new_weights_exactly(
    shared_server: InferenceServer,
) -> None:
    """No request is lost. The logprobs are those of the old weights up to the update and of the new
    weights afterwards, and the answer names both versions."""
    prompt = [5, 6, 7]
    with attached_trainer(shared_server) as trainer:
        trainer.step(0)
        update = update_in_flight(shared_server, trainer, prompt)
        assert update.after == (update.before.epoch, update.before.step + 1)
        completions = GenerateAnswer.model_validate(update.reply).completions()
        assert [len(c.token_ids) for c in completions] == [FLIGHT_TOKENS] * FLIGHTS
        for completion in completions:
            assert (completion.first_version, completion.last_version) == (
                update.before,
                update.after,
            )
            old = logprobs(update.old_policy, prompt, completion.token_ids).tolist()
            new = logprobs(trainer.policy, prompt, completion.token_ids).tolist()
            assert deviation_at_best_switch(completion.logprobs, old, new) < 10 * FLOAT32_NOISE
            assert largest_difference(old, new) > 0.5


def deviation_at_best_switch(logged: list[float], old: list[float], new: list[float]) -> float:
    """The smallest possible maximum of |logged - old| before some token and |logged - new| after
    it."""
    from_old = [abs(a - b) for a, b in zip(logged, old, strict=True)]
    from_new = [abs(a - b) for a, b in zip(logged, new, strict=True)]
    return min(max([*from_old[:k], *from_new[k:]]) for k in range(1, len(logged)))


@ON_CPU
def test_there_is_one_copy_of_the_weights(shared_server: InferenceServer) -> None:
    gc.collect()  # mappings of trainers from earlier tests
    with attached_trainer(shared_server) as trainer:
        trainer.step(0)
        weights = trainer.sync.weights
        total = weights.manifest.total_bytes
        whole = TensorRegion(offset=0, nbytes=total, shape=(total,), dtype="uint8")
        low = weights.address(whole)
        parameters = list(trainer.policy.parameters())
        assert all(low <= p.data_ptr() < low + total for p in parameters)
        assert sum(p.nbytes for p in parameters) > 0.9 * total  # the rest is padding

        served, ours = weight_mappings()
        assert min(served["Rss"], ours["Rss"]) >= 0.99 * total
        # A page that two processes map counts half in the proportional share of each.
        assert served["Pss"] + ours["Pss"] == pytest.approx(total, rel=0.05)
        assert ours["Private_Clean"] + ours["Private_Dirty"] == 0


@pytest.mark.parametrize(
    "control", ["private_copy", pytest.param("packed_lm_head", marks=[ON_CPU, pytest.mark.full])]
)
def test_a_server_that_serves_copies_is_caught_after_one_step(
    control: str, tiny_model: Path, tmp_path: Path
) -> None:
    server = start_inference(
        tiny_model,
        tmp_path,
        *("--dtype", "float32"),
        control_port=free_port(),
        environment=control_plugin(control, tmp_path),
    )
    try:
        assert_state_changes_on_the_control_port_alone(server)
        with attached_trainer(server) as trainer:
            assert trainer.alignment().max < FLOAT32_NOISE  # undetectable before a step
            trainer.step(0)
            alignment = trainer.alignment()
            assert min(alignment.moved, alignment.mean) > 0.05
            with pytest.raises(ServedWeightsDiffer, match="LogProb Alignment: MISMATCH!"):
                trainer.check.require(None, "After step 0")
    finally:
        stop_inference(server)


def assert_state_changes_on_the_control_port_alone(server: InferenceServer) -> None:
    for route in ("pause", "resume"):
        on_public = httpx.post(f"{server.url}/bridge/{route}", json={"session": "s"})
        assert on_public.status_code == 404
        on_control = httpx.post(f"{server.control_url}/bridge/{route}", json={"session": "s"})
        assert on_control.status_code == 422
    assert httpx.post(f"{server.control_url}/generate", json={}).status_code == 404


@ON_CPU
def test_a_model_that_cannot_be_shared_is_refused_naming_every_parameter(
    tiny_model: Path, tmp_path: Path
) -> None:
    server = launch_inference(
        tiny_model, tmp_path, "--dtype", "float32", environment=control_plugin("stock", tmp_path)
    )
    try:
        assert server.process.wait(START_DEADLINE_S) != 0
        log = server.process.log_path.read_text()
        assert "UnshareableWeights" in log
        for name in ("0.self_attn.qkv_proj", "3.mlp.gate_up_proj"):
            assert f"model.layers.{name}.weight: moved out of shared memory" in log
    finally:
        stop_inference(server)


def test_parameters_that_left_the_shared_memory_stop_the_step(
    shared_server: InferenceServer,
) -> None:
    """.to(), share_memory_() and flattening optimizers move parameters like this, without a
    warning."""
    with attached_trainer(shared_server) as trainer:
        version = trainer.bridge.info().policy_version
        layers = trainer.policy.model
        for parameter in (layers.norm.weight, layers.layers[1].self_attn.q_proj.bias):
            parameter.data = parameter.data.clone()
        with pytest.raises(MovedParameters) as moved:
            trainer.step(0)
        for named in ("2 parameters", "model.norm.weight", "model.layers.1.self_attn.q_proj.bias"):
            assert named in str(moved.value)
        assert trainer.bridge.info().policy_version == version
        assert not trainer.bridge.info().paused


def refusal_to_attach(server: InferenceServer, model: Path, dtype: str) -> str:
    with BridgeClient(server.url) as bridge:
        sync = SharedVllm(ServerConnection(bridge, dtype=dtype), str(model))
        with pytest.raises(PolicyMismatch) as mismatch:
            sync.load_policy()
        sync.close()
    return str(mismatch.value)


def test_another_model_than_the_served_one_is_refused_with_every_difference(
    shared_server: InferenceServer, tmp_path: Path
) -> None:
    other = TinySpec(layers=5, width=64, tie_word_embeddings=False)
    build_model(len(build_tokenizer()), other).save_pretrained(tmp_path)
    message = refusal_to_attach(shared_server, tmp_path, "auto")
    assert "lm_head.weight: the server has no such parameter" in message
    assert "model.layers.4.mlp.up_proj.weight: the server has no such parameter" in message
    assert "model.norm.weight: served shape [128], policy shape [64]" in message


def test_another_dtype_than_the_served_one_is_refused(shared_server: InferenceServer) -> None:
    message = refusal_to_attach(shared_server, shared_server.model, "bfloat16")
    assert "--dtype bfloat16, but the server's weights are in float32" in message
