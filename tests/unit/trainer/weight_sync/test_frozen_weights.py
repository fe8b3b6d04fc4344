"""Frozen weights are in no checkpoint, so a run goes on only with the weights that it froze."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_core.clients.inference import BridgeClient
from grpo_core.tree.trainer_command import CommandLine
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.checkpoint.resume import require_fit
from grpo_trainer.checkpoint.store import capture, checksum_of_untrained
from grpo_trainer.data.batches import Position
from grpo_trainer.errors import PolicyMismatch, StateMismatch
from grpo_trainer.model.adapter import trained_parameters, with_adapter
from grpo_trainer.model.division import frozen_checksum
from grpo_trainer.model.policy import train_only
from grpo_trainer.optim.master_optimizer import build_optimizer
from grpo_trainer.weight_sync.attachment import ServerConnection
from grpo_trainer.weight_sync.shared import SharedVllm
from grpo_trainer.weight_sync.shared_memory import build_policy
from tests.unit.trainer.forward_rig import qwen
from tests.unit.trainer.served_memory import served
from tests.unit.trainer.tiny_policy import LORA, model_directory

LAYERS = (1,)


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("shared_vllm", r"frozen weights: .* restart the server"),
        ("lora_only", "another model than the one that the adapter was"),
    ],
)
def test_a_checkpoint_belongs_to_its_frozen_weights(mode: str, told: str) -> None:
    options = {"train_layer_indices": "1"} if mode == "shared_vllm" else {}
    settings = CommandLine.model_validate({"model": "m", "mode": mode, **options}).settings()

    def policy_of(base: Any) -> Any:
        if mode == "lora_only":
            return with_adapter(base, LORA)
        train_only(base, LAYERS)
        return base

    policy = policy_of(qwen())
    optimizer = build_optimizer(policy, settings)
    frozen = checksum_of_untrained(policy, settings)
    record = capture(policy, optimizer, settings, Position(1, 1, 1), "r", frozen)
    with torch.no_grad():
        for parameter in trained_parameters(policy).values():
            parameter.add_(1.0)
    require_fit(record, policy, settings, "here")
    other = qwen()
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.view(-1)[0] += 1
    with pytest.raises(StateMismatch, match=told):
        require_fit(record, policy_of(other), settings, "here")


@pytest.mark.parametrize("is_same", [True, False])
def test_a_restarted_server_must_have_the_frozen_weights(is_same: bool, tmp_path: Path) -> None:
    began = model_directory(tmp_path / "began")
    restarted = served(model_directory(tmp_path / "files", seed=0 if is_same else 1))
    info = SimpleNamespace(policy_version=PolicyVersion(1, 0), awaiting_weights=True)
    with BridgeClient("http://127.0.0.1:1") as bridge:
        sync: Any = SharedVllm(ServerConnection(bridge), "model")
        sync._policy = build_policy(str(began), served(began))
        train_only(sync._policy, LAYERS)
        sync._frozen = frozen_checksum(sync._policy)
        sync._server = SimpleNamespace(
            reattach=lambda _: SimpleNamespace(weights=restarted, info=info)
        )
        if is_same:
            sync._reattach("it ended")
        else:
            with pytest.raises(PolicyMismatch, match="its frozen weights differ"):
                sync._reattach("it ended")
