"""What the training loop knows of a weight-sync mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from grpo_core.wire import PolicyVersion
from grpo_trainer.optimizer import MasterOptimizer


@dataclass(frozen=True)
class Published:
    """One update as it went out."""

    version: PolicyVersion
    grad_norm: float
    optimizer_s: float
    """Seconds of the optimizer step; serving goes on meanwhile where the mode allows."""
    publish_s: float
    """Seconds from asking the server to stop until it serves the new weights."""


class WeightSync(Protocol):
    """Owns the policy's weights and their way to the server."""

    def load_policy(self, restoring: bool = False) -> Any:
        """The model to train, a transformers causal language model.

        Args:
            restoring: a saved state takes the place of its weights before they are used.
        """

    def start(self, optimizer: MasterOptimizer, step: int, last_epoch: int = 0) -> PolicyVersion:
        """Bring the server to the weights of `step`, the optimizer's masters, and announce them.

        Args:
            last_epoch: of the state that the run goes on from; a later one is opened.
        """

    def apply(self, optimizer: MasterOptimizer, step: int) -> Published:
        """Take the optimizer step with index `step` and serve its result."""

    def tend(self) -> None:
        """Called while the trainer waits: mend what happened to the server meanwhile."""

    def served_logprobs(self, token_ids: list[int]) -> list[float]:
        """The server's log-probabilities of token_ids[1:]; [T] → [T-1]."""

    def close(self) -> None:
        """Let go of the server. The weights served last stay served."""
