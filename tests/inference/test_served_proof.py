"""What the trainer must notice of a real server after a publication, with hand-made faults."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_core.inference_client import BridgeClient, Completion
from grpo_core.wire import PolicyVersion
from grpo_trainer.errors import ServedWeightsDiffer
from grpo_trainer.weight_sync.served_proof import ProbeLengths, ServedProof
from tests.fixtures.adapters import load, make_adapter
from tests.fixtures.handed_off import HandedOffServer, serve_by_hand
from tests.negative_controls.plugin import control_plugin

NOISE = 1e-4


@dataclass
class Asked:
    """The server, as the proof asks it."""

    bridge: BridgeClient

    def served_logprobs(self, token_ids: list[int]) -> list[float]:
        return self.bridge.prompt_logprobs(token_ids)

    def sample(self, prompt_token_ids: list[int], max_tokens: int) -> Completion:
        return self.bridge.sample(
            prompt_token_ids, max_tokens=max_tokens, temperature=1.0, ignore_eos=True
        )


@dataclass
class Trainer:
    """Holds a policy that it may be given any weights."""

    policy: Any
    proof: ServedProof

    @torch.no_grad()
    def hold(self, other: Any) -> None:
        """Train, as it were, until the weights are those of `other`."""
        ours = dict(self.policy.named_parameters())
        for name, parameter in other.named_parameters():
            ours[name].copy_(parameter)


@contextmanager
def trainer_of(handed: HandedOffServer, begins_with: Path) -> Iterator[Trainer]:
    policy = load(handed.server.model, begins_with)
    with BridgeClient(handed.server.url) as bridge:
        info = bridge.info()
        lengths = ProbeLengths.fitting(info.kv_block_size, info.max_model_len)
        yield Trainer(policy, ServedProof(policy, Asked(bridge), lengths))


@pytest.fixture(scope="module")
def nothing_learnt(tiny_model: Path, lora: HandedOffServer) -> Path:
    """An adapter that changes nothing."""
    directory = lora.weights[0].parent / f"zero-{uuid.uuid4().hex}"
    return make_adapter(tiny_model, directory, seed=0, strength=0.0)


def test_weights_that_are_served_pass_and_every_other_is_named(
    lora: HandedOffServer, nothing_learnt: Path
) -> None:
    first, second, other = (load(lora.server.model, directory) for directory in lora.weights)
    with trainer_of(lora, nothing_learnt) as trainer:
        trainer.hold(first)
        version = lora.publish(lora.weights[0])
        proven = trainer.proof.require(version, "After step 1")
        assert proven.max < NOISE
        assert proven.moved > 0.05

        trainer.hold(second)
        version = lora.publish(nothing_learnt)
        with pytest.raises(ServedWeightsDiffer, match="without what was trained"):
            trainer.proof.require(version, "base served instead of the adapter")
        version = lora.publish(lora.weights[0])
        with pytest.raises(ServedWeightsDiffer, match="weights of the publication before"):
            trainer.proof.require(version, "the step before")
        version = lora.publish(lora.weights[2])
        with pytest.raises(ServedWeightsDiffer, match="weights of another run"):
            trainer.proof.require(version, "an adapter of another run")
        trainer.hold(other)
        with pytest.raises(ServedWeightsDiffer, match="another trainer that publishes"):
            trainer.proof.require(PolicyVersion(99, 1), "another name than announced")
        assert trainer.proof.require(version, "at last").max < NOISE


def test_a_checkpoint_of_the_step_before_is_named(plain: HandedOffServer) -> None:
    served = plain.sample([1, 2, 3])[2][0]
    weights = [plain.server.model, *plain.weights]
    policies = [load(plain.server.model, directory) for directory in weights]
    held = min(range(len(weights)), key=lambda i: plain.difference(policies[i], [5, 6, 7]))
    with trainer_of(plain, weights[held]) as trainer:
        assert trainer.proof.require(PolicyVersion(*served), "as it is").max < NOISE
        trainer.hold(policies[held - 1])
        with pytest.raises(ServedWeightsDiffer, match=r"publication before|started with"):
            trainer.proof.require(PolicyVersion(*served), "after a step")


def test_keys_and_values_that_outlive_a_swap_are_found(
    tiny_model: Path, redis_url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "weights"
    adapters = [make_adapter(tiny_model, folder / f"adapter-{i}", seed=i) for i in range(2)]
    environment = control_plugin("kept_kv", tmp_path)
    with serve_by_hand(
        tiny_model, redis_url, tmp_path, adapters, "--enable-lora", environment=environment
    ) as faulty:
        first, second = (load(tiny_model, adapter) for adapter in adapters)
        with trainer_of(faulty, adapters[0]) as trainer:
            trainer.hold(first)
            trainer.proof.require(faulty.publish(adapters[0]), "first")
            trainer.hold(second)
            trainer.proof.prime()
            version = faulty.publish(adapters[1])
            with pytest.raises(ServedWeightsDiffer, match="still in its KV cache"):
                trainer.proof.require(version, "swapped")
