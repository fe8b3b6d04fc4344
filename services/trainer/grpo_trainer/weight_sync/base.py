"""The interface between the training loop and a weight-sync mode."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.checks.served_weights import Alignment, Bound
from grpo_trainer.errors import EngineCrashed
from grpo_trainer.model.policy import CausalLM
from grpo_trainer.optim.master_optimizer import MasterOptimizer

log = structlog.get_logger()


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


class PeriodicSync:
    """Publishes after every `every_steps` steps and after `last_step`. `version`: of the policy's
    weights."""

    every_steps: int
    last_step: int
    version: PolicyVersion

    def publish(self, optimizer: MasterOptimizer, step: int) -> Published:
        """As `WeightSync.publish`. Raises the errors of `publish_now`."""
        started = time.monotonic()
        optimizer.write_into_parameters()
        self.version = PolicyVersion(self.version.epoch, step)
        if step % self.every_steps and step != self.last_step:
            return Published(self.version, 0.0, is_served=False)
        alignment = self.publish_now(f"After step {step}")
        return Published(self.version, time.monotonic() - started, alignment=alignment)

    def publish_now(self, label: str) -> Alignment:
        """Publish the policy's weights, and check the server. Args: label: names the moment in
        error messages"""
        raise NotImplementedError


TOLERATED_CRASHES = 1


@dataclass
class CrashWatch:
    """Counts the engine's crashes while the trainer waits for the answer to one request.

    Anything may end an engine once, so the trainer repeats the request after the first crash. If
    the engine crashes again, the request itself is the likely cause.

    Args:
        request: names the request in messages
    """

    request: str
    _crashes: int = field(init=False, default=0)

    def note(self, crashes: int) -> bool:
        """Whether the engine has crashed since the previous call.

        Args:
            crashes: number of crashes since the request was first sent

        Raises:
            EngineCrashed: the engine has crashed twice.
        """
        if crashes <= self._crashes:
            return False
        self._crashes = crashes
        if crashes > TOLERATED_CRASHES:
            raise EngineCrashed(
                f"the server's engine crashed {crashes} times while the trainer waited for "
                f"{self.request}, so this request probably crashes it. Read the lines before "
                "engine.crashed in the server's log (logs/vllm-server.log of a local run; "
                "vllm_server.log in --save-path if grpo started the server). Fix the cause, then "
                "start the trainer again to resume from its newest checkpoint"
            )
        log.warning(
            "engine.crashed_during_check",
            request=self.request,
            hint="the trainer repeats the request once; read the server's log",
        )
        return True
