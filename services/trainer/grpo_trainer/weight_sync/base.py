"""The interface between the training loop and a weight-sync mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from grpo_core.clients.inference import Completion
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.model.policy import CausalLM
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.verify.alignment import Alignment, Bound


@dataclass(frozen=True)
class Published:
    """The result of one optimizer step and its publication.

    `version` names the trainer's current weights, even if the server does not serve them yet.
    """

    version: PolicyVersion
    grad_norm: float
    optimizer_s: float
    """Duration of the optimizer step in seconds. The server keeps sampling meanwhile if the mode
    allows it."""
    publish_s: float
    """Seconds from the end of the optimizer step until the server serves the new weights; 0 if they
    were not published."""
    is_served: bool = True
    """False if the server continues with older weights."""
    alignment: Alignment | None = None
    """The result of the check of this publication, in modes that check every one."""


class WeightSync(Protocol):
    """Owns the policy's weights and publishes them to the server."""

    begun_as: PolicyVersion | None
    """The policy version under which the server already served the weights of `start`. None if
    `start` published them."""
    server_run_id: str | None
    """The server's --run-id, known after `load_policy`; None if the server runs without Redis."""

    def load_policy(self, restoring: bool = False) -> CausalLM:
        """Load the model to train, a transformers causal language model.

        Args:
            restoring: a checkpoint replaces its weights before they are used
        """

    def start(
        self,
        optimizer: MasterOptimizer,
        step: int,
        last_epoch: int = 0,
        bound: Bound | None = None,
    ) -> PolicyVersion:
        """Publish the optimizer's master weights as the weights of `step`; returns their policy
        version.

        Args:
            last_epoch: the epoch of the checkpoint that the run resumes from; a later one is
                started
            bound: the tolerance, in modes that check their publications (default: a bound that
                learns)
        """

    def apply(self, optimizer: MasterOptimizer, step: int) -> Published:
        """Take the optimizer step with index `step`, and publish its result if a publication is
        due."""

    def recover_server(self) -> None:
        """Wait for the server's return if it stopped. Called repeatedly while the trainer waits for
        a batch."""

    def served_logprobs(self, token_ids: list[int]) -> list[float]:
        """The server's logprobs of token_ids[1:]: [T] → [T-1]."""

    def sample(self, prompt_token_ids: list[int], max_tokens: int) -> Completion:
        """Exactly `max_tokens` tokens that the server samples at temperature 1."""

    def close(self) -> None:
        """Disconnect from the server. It keeps serving the latest published weights."""
