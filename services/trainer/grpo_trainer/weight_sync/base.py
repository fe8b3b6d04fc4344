"""The interface between the training loop and a weight-sync mode, and what the modes share."""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Protocol, TypeVar

import structlog

from grpo_core.clients.inference import BridgeClient, Completion
from grpo_core.deadline import Deadline
from grpo_core.errors import ServiceUnavailable
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.checks.served_weights import Alignment, Bound
from grpo_trainer.errors import EngineCrashed
from grpo_trainer.model.policy import CausalLM
from grpo_trainer.optim.master_optimizer import MasterOptimizer

log = structlog.get_logger()

T = TypeVar("T")


@dataclass(frozen=True)
class Incidents:
    """What happened since the previous publication. `left`: servers that went away. `repeated`:
    announcements that Redis had lost. `unanswered`: requests of checks that a server did not answer
    while others served."""

    left: int = 0
    repeated: int = 0
    unanswered: int = 0


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


PROBE_DEADLINE_S = 30.0
POLL_S = 0.1
TOLERATED_CRASHES = 1
"""Anything may end an engine once. If it crashes again, the request is the likely cause."""


class CheckedServer:
    """A vllm-server that receives the requests of checks, which are repeated while its engine
    restarts."""

    bridge: BridgeClient

    def crashes(self) -> int:
        """Number of crashes of the engine that are known now."""
        raise NotImplementedError

    def await_serving(self) -> None:
        """Wait until the server serves the policy's weights. Raises `LostServer`."""
        raise NotImplementedError

    def served_logprobs(self, token_ids: list[int]) -> list[float]:
        """The server's logprobs of token_ids[1:]: [T] → [T-1].

        Raises:
            ServiceUnavailable: a running server does not answer for 30 s.
            EngineCrashed: the request crashes the engine.
            LostServer: the server stopped and did not come back in time.
        """
        return self._while_serving(
            f"the logprobs of {len(token_ids)} tokens",
            lambda: self.bridge.prompt_logprobs(token_ids),
        )

    def sample(self, prompt_token_ids: list[int], max_tokens: int) -> Completion:
        """Raises the errors of `served_logprobs`."""
        return self._while_serving(
            f"{max_tokens} sampled tokens after a prompt of {len(prompt_token_ids)} tokens",
            lambda: self.bridge.sample(
                prompt_token_ids, max_tokens=max_tokens, temperature=1.0, ignore_eos=True
            ),
        )

    def _while_serving(self, request: str, ask: Callable[[], T]) -> T:
        """Retry until the server answers. The time during which it is down does not count.

        The client of `ask` retries too, so the engine may also have crashed if `ask` succeeds.
        """
        self.await_serving()
        deadline, seen = Deadline(PROBE_DEADLINE_S), self.crashes()
        most = seen + TOLERATED_CRASHES
        while True:
            failure = None
            try:
                answer = ask()
            except ServiceUnavailable as error:
                failure = error
            known, seen = seen, _noted(request, self.crashes(), seen, most)
            if failure is None:
                return answer
            with deadline.suspended():
                self.await_serving()
            seen = _noted(request, self.crashes(), seen, most)
            if seen > known:
                deadline = Deadline(PROBE_DEADLINE_S)  # for the new engine
            elif deadline.has_passed:
                raise failure
            time.sleep(POLL_S)


def _noted(request: str, crashes: int, seen: int, most: int) -> int:
    """The number of crashes, which is logged if it rose.

    Raises:
        EngineCrashed: there are more than `most`.
    """
    if crashes > most:
        raise EngineCrashed(
            f"the server's engine crashed {crashes - most + TOLERATED_CRASHES} times while the "
            f"trainer waited for {request}, so this request probably crashes it. Read the lines "
            "before engine.crashed in the server's log (logs/vllm-server.log of a local run; "
            "vllm_server.log in --save-path if grpo started the server). Fix the cause, then start "
            "the trainer again"
        )
    if crashes > seen:
        log.warning(
            "engine.crashed_during_check",
            request=request,
            hint="the trainer repeats the request once; read the server's log",
        )
    return crashes
