"""The trainer's check of a publication detects servers that serve other weights than announced."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_core.clients.inference import BridgeClient, Completion
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.errors import ServedWeightsDiffer
from grpo_trainer.verify.publication import ProbeLengths, PublicationCheck
from tests.fixtures.adapters import load, make_adapter
from tests.fixtures.file_sync import HandedOffServer, serve_by_hand
from tests.fixtures.inference import FILE_NOISE
from tests.negative_controls.grpo_negative_controls import control_plugin


@dataclass
class Asked:
    """The server, with the methods that `PublicationCheck` calls."""

    bridge: BridgeClient

    def served_logprobs(self, token_ids: list[int]) -> list[float]:
        return self.bridge.prompt_logprobs(token_ids)

    def sample(self, prompt_token_ids: list[int], max_tokens: int) -> Completion:
        return self.bridge.sample(
            prompt_token_ids, max_tokens=max_tokens, temperature=1.0, ignore_eos=True
        )


@dataclass
class Trainer:
    """A policy whose weights a test can replace."""

    policy: Any
    check: PublicationCheck

    @torch.no_grad()
    def hold(self, other: Any) -> None:
        """Replace the weights by those of `other`, as if training had produced them."""
        ours = dict(self.policy.named_parameters())
        for name, parameter in other.named_parameters():
            ours[name].copy_(parameter)


@contextmanager
def trainer_of(handed: HandedOffServer, begins_with: Path) -> Iterator[Trainer]:
    policy = load(handed.server.model, begins_with)
    with BridgeClient(handed.server.url) as bridge:
        info = bridge.info()
        lengths = ProbeLengths.fitting(info.kv_block_size, info.max_model_len)
        yield Trainer(policy, PublicationCheck(policy, Asked(bridge), lengths))


def test_the_served_weights_pass_and_every_others_are_named(lora: HandedOffServer) -> None:
    folder = lora.weights[0].parent / f"zero-{uuid.uuid4().hex}"
    untrained = make_adapter(lora.server.model, folder, seed=0, strength=0.0)
    first, second, third = (load(lora.server.model, directory) for directory in lora.weights)
    with trainer_of(lora, untrained) as trainer:
        trainer.hold(first)
        version = lora.publish(lora.weights[0])
        proven = trainer.check.require(version, "After step 1")
        assert proven.max < FILE_NOISE < proven.moved

        trainer.hold(second)
        for served, cause in (
            (untrained, "without any training"),
            (lora.weights[0], "weights of the previous publication"),
            (lora.weights[2], "weights of another run"),
        ):
            version = lora.publish(served)
            with pytest.raises(ServedWeightsDiffer, match=cause):
                trainer.check.require(version, "After step 2")

        trainer.hold(third)
        with pytest.raises(ServedWeightsDiffer, match="another trainer publishes"):
            trainer.check.require(PolicyVersion(99, 1), "under another name than announced")
        assert trainer.check.require(version, "at last").max < FILE_NOISE


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
            trainer.check.require(faulty.publish(adapters[0]), "first")
            trainer.hold(second)
            trainer.check.prime()
            version = faulty.publish(adapters[1])
            with pytest.raises(ServedWeightsDiffer, match="still in the server's KV cache"):
                trainer.check.require(version, "swapped")
