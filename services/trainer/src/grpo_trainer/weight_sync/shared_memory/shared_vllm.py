"""Mode `shared_vllm`: trainer and server hold one copy of the weights.

This file alone may pause the server, write the weights, name the new version and resume.

A server that restarts has other memory, with the checkpoint's weights in it. The trainer waits for
it, makes its policy of views into the new memory and writes the masters there, before the server
answers anybody.
"""

from __future__ import annotations

import time

import structlog

from grpo_core.clients.inference import BridgeClient, BridgeInfo
from grpo_core.deadline import Deadline
from grpo_core.errors import RequestRefused, ServiceUnavailable
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.checkpoint.store import OpenedEpochs
from grpo_trainer.config.trainer import AUTO_DEVICE
from grpo_trainer.errors import TornWeights, WeightSyncError
from grpo_trainer.model.loading import import_architecture
from grpo_trainer.model.policy_protocol import CausalLM
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.verify.alignment import Bound
from grpo_trainer.weight_sync.base import Published
from grpo_trainer.weight_sync.shared_memory.attachment import (
    RETURN_DEADLINE_S,
    RETURN_POLL_S,
    ServerConnection,
    WeightPlaces,
)
from grpo_trainer.weight_sync.shared_memory.memory import MappedWeights
from grpo_trainer.weight_sync.shared_memory.views import (
    build_policy,
    check_views,
    move_views,
    release_views,
)

log = structlog.get_logger()

PROBE_DEADLINE_S = 30.0
_CONFLICT = 409


class SharedVllm:
    """Args:
    bridge: control client of the server
    places: where its weight socket is
    dtype: what the server must hold; "auto": whatever it holds
    device: where the server must hold it; "auto": wherever it does
    lease_s: the longest pause to ask for
    return_deadline_s: how long a server that went away may take to come back
    epochs: those that were opened before
    """

    begun_as: PolicyVersion | None = None  # never: what `start` serves has a name of this run

    def __init__(
        self,
        bridge: BridgeClient,
        model_name: str,
        places: WeightPlaces | None = None,
        dtype: str = "auto",
        device: str = AUTO_DEVICE,
        lease_s: float = 30.0,
        return_deadline_s: float = RETURN_DEADLINE_S,
        epochs: OpenedEpochs | None = None,
    ) -> None:
        self._bridge = bridge
        self._server = ServerConnection(
            bridge, places or WeightPlaces(), dtype, device, return_deadline_s
        )
        self._model_name = model_name
        self._lease_s = lease_s
        self._epochs = epochs
        self._policy: CausalLM
        self._optimizer: MasterOptimizer | None = None
        self._version = PolicyVersion(0, 0)

    @property
    def attached(self) -> bool:
        return self._server.attached

    @property
    def weights(self) -> MappedWeights:
        return self._server.attachment.weights

    def load_policy(self, restoring: bool = False) -> CausalLM:
        """Attach to the server's memory and build the policy of views into it.

        Raises:
            ServiceUnavailable: no server, or no weight socket.
            PolicyMismatch: the server shares nothing, or another model.
            TornWeights: a trainer before this one was cut off while it wrote, and its weights are
                to be trained on.
        """
        import_architecture(self._model_name)
        attachment = self._server.attach()
        info = attachment.info
        if not restoring:
            self._refuse_torn(info)
            _say_where_it_starts(info)
        self._policy = build_policy(self._model_name, attachment.weights)
        self._version = info.policy_version.next_epoch()
        log.info(
            "attached to the server's weights",
            generation=attachment.weights.manifest.generation,
            megabytes=round(attachment.weights.manifest.total_bytes / 1e6, 1),
            dtype=attachment.weights.dtype_name,
            device=str(attachment.weights.device),
        )
        return self._policy

    def start(
        self,
        optimizer: MasterOptimizer,
        step: int,
        last_epoch: int = 0,
        bound: Bound | None = None,  # noqa: ARG002
    ) -> PolicyVersion:
        """Write the masters back and announce them under an epoch beyond the server's, `last_epoch`
        and every one that was opened."""
        self._optimizer = optimizer
        if self._epochs is not None:
            last_epoch = max(last_epoch, self._epochs.newest())
        self._version = _opened_after(self._version, last_epoch)
        return self._publish(step)

    def apply(self, optimizer: MasterOptimizer, step: int) -> Published:
        """Step on the masters while serving goes on, then write them into the served weights.

        Raises:
            MovedParameters: the policy is no longer made of views; nothing was written.
            NonFiniteGradient: nothing was written.
            LostServer: the server went away and did not come back in time.
        """
        check_views(self._policy, self.weights)
        started = time.monotonic()
        grad_norm = optimizer.step(step)
        self.weights.wait_until_written()  # a GPU may still be stepping: not in the pause
        stepped = time.monotonic()
        version = self._publish(step + 1)
        return Published(
            version=version,
            grad_norm=grad_norm,
            optimizer_s=stepped - started,
            publish_s=time.monotonic() - stepped,
        )

    def recover_server(self) -> None:
        """Where the server went away: wait for its return and write the weights back.

        Raises:
            LostServer: it did not come back in time.
        """
        if self._server.attachment.is_lost():
            self._reattach("its connection closed")
            self._publish(self._version.step)

    def served_logprobs(self, token_ids: list[int]) -> list[float]:
        """Raises `ServiceUnavailable` where a living server does not answer for 30 s."""
        deadline = Deadline(PROBE_DEADLINE_S)
        while True:
            self.recover_server()
            try:
                return self._bridge.prompt_logprobs(token_ids)
            except ServiceUnavailable:
                if deadline.has_passed and not self._server.attachment.is_lost():
                    raise
                time.sleep(RETURN_POLL_S)

    def close(self) -> None:
        self._server.close()
        self._bridge.close()

    def _publish(self, step: int) -> PolicyVersion:
        """Serve the masters as the weights of `step`, on a restarted server if need be.

        A server that is dying may take a connection and answer for a while: what it cannot do is
        tried again until the deadline.
        """
        deadline = Deadline(self._server.return_deadline_s)
        while True:
            if self._server.attachment.is_lost():
                self._reattach("its connection closed")
            version = PolicyVersion(self._version.epoch, step)
            if self._epochs is not None:
                self._epochs.open(version.epoch)
            try:
                self._write(version)
            except (ServiceUnavailable, RequestRefused) as error:
                self._check_is_about_the_session(error, version)
                if deadline.has_passed:
                    raise self._server.did_not_return(str(error)) from error
                release_views(self._policy)
                time.sleep(RETURN_POLL_S)
                self._reattach(str(error))
            else:
                self._version = version
                return version

    def _write(self, version: PolicyVersion) -> None:
        """pause → write → name → resume."""
        assert self._optimizer is not None, "start() comes first"
        session = self._server.attachment.session
        try:
            self._bridge.pause(session, self._lease_s, version)
            self._optimizer.write_into_parameters()
            self.weights.wait_until_written()
            self._bridge.resume(session, written=True)
        except BaseException:
            # The write may be half done. Closing the connection makes the server go on and stop
            # calling these weights by a version that a trainer chose.
            self._server.close()
            raise

    def _reattach(self, why: str) -> None:
        release_views(self._policy)
        attachment = self._server.reattach(why)
        move_views(self._policy, attachment.weights)
        self._version = _usable_after(self._version, attachment.info)

    def _refuse_torn(self, info: BridgeInfo) -> None:
        if not info.weights_intact:
            raise TornWeights(
                f"the trainer before this one was cut off while it may have been writing: the "
                f"server at {self._bridge.base_url} may hold half an update. Restart the server, "
                "which loads its checkpoint again, or go on from a saved state (--resume auto)"
            )

    def _check_is_about_the_session(self, error: Exception, version: PolicyVersion) -> None:
        """A conflict or a broken connection is mended by attaching again; nothing else is."""
        if isinstance(error, RequestRefused) and error.status != _CONFLICT:
            raise WeightSyncError(
                f"cannot publish version {tuple(version)}: {error}. Is --vllm-control-url that of "
                "the server's control port?"
            ) from error


def _usable_after(ours: PolicyVersion, info: BridgeInfo) -> PolicyVersion:
    """Our version, in a new epoch where the server's name for its weights stands in the way.

    A restarted server waits for the very version that it lost; any other may be taken once only.
    """
    served = info.policy_version
    is_taken = served > ours or (served == ours and not info.awaiting_weights)
    return PolicyVersion(served.epoch + 1, ours.step) if is_taken else ours


def _opened_after(ours: PolicyVersion, last_epoch: int) -> PolicyVersion:
    """A server that knows of no run names an epoch that the run has had."""
    return PolicyVersion(max(ours.epoch, last_epoch + 1), ours.step)


def _say_where_it_starts(info: BridgeInfo) -> None:
    if info.awaiting_weights:
        log.warning(
            "the weights this run was served are lost; training starts from the checkpoint",
            lost_policy_version=info.policy_version,
        )
    elif info.policy_version != (0, 0):
        log.warning(
            "an earlier trainer has updated this server; training goes on from its weights",
            policy_version=info.policy_version,
        )
