"""The interface between the training loop and a weight-sync mode, and what the modes share."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Protocol

from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.checks.served_weights import Alignment, Bound
from grpo_trainer.model.policy import CausalLM
from grpo_trainer.optim.master_optimizer import MasterOptimizer


@dataclass(frozen=True)
class Incidents:
    """What happened since the previous publication. `left`: servers that went away. `repeated`:
    announcements that Redis had lost. `unanswered`: requests of checks that a server did not answer
    while others served. `by_files`: versions that were written as files, with --weight-transport
    collective."""

    left: int = 0
    repeated: int = 0
    unanswered: int = 0
    by_files: int = 0


@dataclass(frozen=True)
class Reach:
    """How far an announced version has come. `servers`: that serve it. `bytes`: that each has to
    fetch. `first_s`, `all_s`: seconds from the announcement until the first server serves it, and
    until all do that served before; None if the trainer did not wait for all."""

    servers: int
    bytes: int
    first_s: float
    all_s: float | None
    incidents: Incidents = Incidents()


@dataclass(frozen=True)
class Published:
    """`version` names the trainer's current weights, even if the server does not serve them yet."""

    version: PolicyVersion
    seconds: float
    """Until the server serves the weights; 0 if they were not published."""
    is_served: bool = True
    """False if the server continues with older weights."""
    alignment: Alignment | None = None
    """The result of the check of the served weights; None if no check was due."""
    reach: Reach | None = None
    """None if the mode announces nothing, or nothing was announced."""


class WeightSync(Protocol):
    """Owns the policy's weights and publishes them to the server."""

    begun_as: PolicyVersion | None
    """The policy version under which the server already served the weights of `start`. None if
    `start` published them."""
    epochs: Container[int] | None
    """The epochs that trainers of this run have started; None if that is not recorded."""
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

    def publish(self, optimizer: MasterOptimizer, step: int) -> Published:
        """Write the master weights into the policy as the weights of `step`, and publish them if a
        publication is due.

        Args:
            step: optimizer steps taken so far
        """

    def recover_server(self) -> None:
        """Wait for the server's return if it stopped. Called repeatedly while the trainer waits for
        a batch."""

    def served_logprobs(self, token_ids: list[int]) -> list[float]:
        """The server's logprobs of token_ids[1:]: [T] → [T-1]."""

    def close(self) -> None:
        """Disconnect from the server. It keeps serving the latest published weights."""


POLL_S = 0.1
