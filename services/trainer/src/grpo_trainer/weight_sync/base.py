"""What the training loop knows of a weight-sync mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.model.policy_protocol import CausalLM
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.verify.alignment import Alignment, Bound


@dataclass(frozen=True)
class Published:
    """One update as it went out.

    `version` names the weights that the trainer holds now, whether or not anybody serves them.
    """

    version: PolicyVersion
    grad_norm: float
    optimizer_s: float
    """Seconds of the optimizer step; serving goes on meanwhile where the mode allows."""
    publish_s: float
    """Seconds from the end of the optimizer step until the server serves the new weights; 0 where
    they were not published."""
    is_served: bool = True
    """False where the server goes on with older weights."""
    alignment: Alignment | None = None
    """What the proof of the publication measured, in modes that demand one."""


class WeightSync(Protocol):
    """Owns the policy's weights and their way to the server."""

    begun_as: PolicyVersion | None
    """Where `start` found its weights served already: the name under which they are. None where it
    published them itself."""

    def load_policy(self, restoring: bool = False) -> CausalLM:
        """The model to train, a transformers causal language model.

        Args:
            restoring: a saved state takes the place of its weights before they are used.
        """

    def start(
        self,
        optimizer: MasterOptimizer,
        step: int,
        last_epoch: int = 0,
        bound: Bound | None = None,
    ) -> PolicyVersion:
        """Have the server serve the weights of `step`, the optimizer's masters; returns the name
        that they have from now on.

        Args:
            last_epoch: of the state that the run goes on from; a later one is opened.
            bound: for modes that prove their publications (default: one that learns)
        """

    def apply(self, optimizer: MasterOptimizer, step: int) -> Published:
        """Take the optimizer step with index `step`, and serve its result where that is due."""

    def recover_server(self) -> None:
        """Called while the trainer waits: if the server went away, wait for its return."""

    def served_logprobs(self, token_ids: list[int]) -> list[float]:
        """The server's log-probabilities of token_ids[1:]; [T] → [T-1]."""

    def close(self) -> None:
        """Let go of the server. The weights served last stay served."""
