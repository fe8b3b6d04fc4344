"""The trainer's check of a publication on a real server: it passes the served weights, and detects
keys and values of the previous ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_core.clients.inference import BridgeClient, Completion
from grpo_trainer.checks.served_weights import ProbeLengths, PublicationCheck
from grpo_trainer.errors import ServedWeightsDiffer
from tests.fixtures.adapters import load, make_adapter
from tests.fixtures.file_sync import serve_by_hand
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


@torch.no_grad()
def hold(policy: Any, other: Any) -> None:
    """Replace the policy's weights by those of `other`, as if training had produced them."""
    ours = dict(policy.named_parameters())
    for name, parameter in other.named_parameters():
        ours[name].copy_(parameter)


def test_keys_and_values_that_outlive_a_swap_are_found(
    tiny_model: Path, redis_url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "weights"
    adapters = [make_adapter(tiny_model, folder / f"adapter-{i}", seed=i) for i in range(2)]
    policy, second = (load(tiny_model, adapter) for adapter in adapters)
    environment = control_plugin("kept_kv", tmp_path)
    with (
        serve_by_hand(
            tiny_model, redis_url, tmp_path, adapters, "--enable-lora", environment=environment
        ) as faulty,
        BridgeClient(faulty.server.url) as bridge,
    ):
        info = bridge.info()
        lengths = ProbeLengths.fitting(info.kv_block_size, info.max_model_len)
        check = PublicationCheck(policy, Asked(bridge), lengths)
        version = faulty.publish(adapters[0])
        assert check.require(version, "first").max < FILE_NOISE
        hold(policy, second)
        check.prime()
        version = faulty.publish(adapters[1])
        with pytest.raises(ServedWeightsDiffer, match="still in the server's KV cache"):
            check.require(version, "swapped")
