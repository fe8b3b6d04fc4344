"""What cannot be trained is named in one line, before a server starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import T5Config

from grpo_trainer.errors import UnsupportedModel
from grpo_trainer.model.adapter import with_adapter
from grpo_trainer.model.loading import TrainedWeights, import_architecture
from tests.unit.trainer.tiny_policy import LORA, model_directory


def test_an_adapter_says_how_to_merge_it(tmp_path: Path) -> None:
    base = TrainedWeights(str(model_directory(tmp_path / "base"))).load(torch.float32)
    with_adapter(base, LORA).save_pretrained(tmp_path / "adapter")  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedModel, match="is an adapter; merge it into its base model"):
        TrainedWeights(str(tmp_path / "adapter")).load(torch.float32)


def test_code_of_a_model_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "configuration_own.py").write_text("raise SystemExit('was run')")
    own = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    with pytest.raises(UnsupportedModel, match=r"code of its own \(auto_map\) is not run"):
        import_architecture(str(tmp_path))


def test_a_model_that_does_not_continue_text_is_named(tmp_path: Path) -> None:
    T5Config().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="a t5 is no causal language model"):
        import_architecture(str(tmp_path))
