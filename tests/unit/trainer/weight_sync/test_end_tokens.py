"""Every mode knows the same tokens that end a completion."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from grpo_trainer.model.loading import TrainedWeights
from grpo_trainer.model.policy import end_tokens_of
from grpo_trainer.weight_sync.shared_memory import build_policy
from tests.unit.trainer.served_memory import served
from tests.unit.trainer.tiny_policy import model_directory


def test_end_tokens_of_the_generation_configuration_count_in_shared_memory_too(
    tmp_path: Path,
) -> None:
    model = model_directory(tmp_path / "model")
    file = model / "generation_config.json"
    own = json.loads((model / "config.json").read_text())["eos_token_id"]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [own, 5]}))
    of_files = TrainedWeights(str(model)).load(torch.float32)
    assert end_tokens_of(of_files) == {own, 5}
    assert end_tokens_of(build_policy(str(model), served(model))) == {own, 5}
