"""A random tiny model on disk, its trained parameters, and a function that updates them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from grpo_core.tree.weights import LoraOptions
from grpo_tiny_model.model import build_model, build_tokenizer
from grpo_tiny_model.spec import TinySpec
from grpo_trainer.model.adapter import trained_parameters
from grpo_trainer.optim.master_optimizer import MasterOptimizer

LORA = LoraOptions(r=4, alpha=32, dropout=0.0, target_modules=("q_proj", "v_proj"), layers=None)
VOCABULARY = 259


def model_directory(path: Path, seed: int = 0, **changes: Any) -> Path:
    """Random weights without any training, so that creating them is fast."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    spec = TinySpec(layers=2, width=32, max_positions=256, **changes)
    build_model(len(tokenizer), spec).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def optimizer_of(policy: Any, lr: float = 0.05) -> MasterOptimizer:
    return MasterOptimizer(trained_parameters(policy).values(), lambda _: lr, 0.0, 1.0)


def gather_gradient(policy: Any, seed: int) -> None:
    """Gradients of a supervised loss on random tokens; any gradient will do."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (4, 20), generator=generator)
    policy(input_ids=ids, labels=ids).loss.backward()


def move(policy: Any, optimizer: MasterOptimizer, step: int) -> None:
    """One complete update."""
    gather_gradient(policy, seed=step)
    optimizer.step(step)
    optimizer.write_into_parameters()
