"""Everything that determines the weights of a tiny model."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Lessons:
    """How the model learns to call the calculator; see `grpo_tiny_model.tool_use`."""

    lr: float = 1.5e-3
    previous_token_bias: float = 3.0
    """See `tool_use.attend_to_previous_tokens`."""
    string_lengths: tuple[int, int] = (4, 10)
    """Shortest and longest random string, in characters."""
    copy_rows: int = 32
    copy_loss: float = 0.2
    """The first lesson ends at this mean loss per token, in nats."""
    max_copy_steps: int = 500
    sum_rows: int = 4
    """Sums in a batch that are answered at once; as many are answered with a call."""
    string_rows: int = 3
    """Calls in a batch with a random string in place of a sum, which only copying helps with."""
    max_call_steps: int = 300
    evaluated_sums: int = 64


@dataclass(frozen=True)
class TinySpec:
    """Its hash names the cache entry."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    max_positions: int = 2048
    target_accuracy: float = 0.30
    """Supervised training stops once this share of sampled answers is right."""
    max_steps: int = 600
    batch_size: int = 32
    lr: float = 1e-3
    eval_every_steps: int = 10
    seed: int = 0
    tie_word_embeddings: bool = True
    tools: bool = False
    """The model learns to call a calculator, by `lessons`, instead of one-digit sums."""
    lessons: Lessons = field(default_factory=Lessons)

    def digest(self) -> str:
        parts = asdict(self)
        if not self.tools:
            del parts["tools"], parts["lessons"]  # no part in these weights
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
