"""Publishes weights in mode `shared_vllm`, by writing into the server's own memory.

Only this file pauses the server, writes the weights, names the new version and resumes.

A restarted server has new memory that holds the weights of its model files. The trainer attaches to
it, moves its policy into the new memory and writes the master weights back. Only then does the
server answer requests.
"""

from __future__ import annotations

import time
from collections.abc import Container
from functools import partial

import structlog

from grpo_core.clients.inference import BridgeInfo
from grpo_core.deadline import Deadline
from grpo_core.errors import RequestRefused, ServiceUnavailable
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.checkpoint.store import OpenedEpochs
from grpo_trainer.checks.served_weights import Alignment, Bound, PublicationCheck, require_written
from grpo_trainer.errors import PolicyMismatch, TornWeights, WeightSyncError
from grpo_trainer.model.division import frozen_checksum
from grpo_trainer.model.loading import TrainedWeights, import_architecture
from grpo_trainer.model.policy import CausalLM
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.weight_sync.attachment import RETURN_POLL_S, ServerConnection
from grpo_trainer.weight_sync.base import Published
from grpo_trainer.weight_sync.probe import CheckedServer
from grpo_trainer.weight_sync.shared_memory import (
    MappedWeights,
    build_policy,
    check_views,
    load_masters,
    move_views,
    release_views,
)

log = structlog.get_logger()

_CONFLICT = 409


class SharedVllm(CheckedServer):
    """Args:
    server: the connection to the server's memory
    lease_s: maximum length of one pause
    epochs: the epochs that earlier trainers of this save path started
    verify_every_steps: check the server after the first update and after every so many steps; 0:
        never
    starts_from_model: a new run publishes the weights of --model first. The server may hold those
        of another run: of an earlier job of a sweep, for example
    """

    begun_as: PolicyVersion | None = None  # always None: `start` publishes
    server_run_id: str | None = None

    def __init__(
        self,
        server: ServerConnection,
        model_name: str,
        lease_s: float = 30.0,
        epochs: OpenedEpochs | None = None,
        verify_every_steps: int = 0,
        starts_from_model: bool = False,
    ) -> None:
        self.bridge = server.bridge
        self._server = server
        self._model_name = model_name
        self._lease_s = lease_s
        self._epochs = epochs
        self.epochs: Container[int] | None = epochs
        self._verify_every_steps = verify_every_steps
        self._starts_from_model = starts_from_model
        self._check: PublicationCheck | None = None
        self._policy: CausalLM
        self._optimizer: MasterOptimizer
        self._frozen = 0
        self._version = PolicyVersion(0, 0)
        self._crashes = 0

    @property
    def weights(self) -> MappedWeights:
        return self._server.attachment.weights

    def load_policy(self, restoring: bool = False) -> CausalLM:
        """Attach to the server's memory and build the policy from views into it.

        Raises:
            ServiceUnavailable: no server, or no weight socket.
            PolicyMismatch: the server shares no weights, or has another model.
            TornWeights: the previous trainer may have died while writing, and this run would start
                from its weights.
        """
        import_architecture(self._model_name)
        attachment = self._server.attach()
        info = attachment.info
        self.server_run_id = info.run_id
        self._starts_from_model &= not restoring
        if not (restoring or self._starts_from_model):
            self._refuse_torn(info)
            _log_starting_weights(info)
        self._policy = build_policy(self._model_name, attachment.weights)
        self._version = info.policy_version.next_epoch()
        log.info(
            "shared_memory.attached",
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
        bound: Bound | None = None,
    ) -> PolicyVersion:
        """Publish the master weights under a new epoch: later than the server's, than `last_epoch`
        and than every epoch started before. Then check the server, unless checks are off.

        Raises:
            ServedWeightsDiffer: the server serves other weights; or layers that are not trained are
                those of another run.
        """
        if self._starts_from_model:
            load_masters(self._policy, TrainedWeights(self._model_name), optimizer)
        self._optimizer = optimizer
        self._frozen = frozen_checksum(self._policy)
        if self._epochs is not None:
            last_epoch = max(last_epoch, self._epochs.newest())
        # A new server counts epochs from 0 again.
        self._version = PolicyVersion(max(self._version.epoch, last_epoch + 1), step)
        version = self._publish(step)
        if self._verify_every_steps:
            self._check = PublicationCheck(self._policy, self, bound=bound)
            self._check.require(None, "Before the first step")
        return version

    def publish(self, optimizer: MasterOptimizer, step: int) -> Published:
        """Write the master weights into the served weights, and check the server if that is due.

        Raises:
            MovedParameters: the policy no longer consists of views; nothing was written.
            LostServer: the server stopped and did not come back in time.
            ServedWeightsDiffer: the server serves other weights, or the update was not written.
        """
        self._optimizer = optimizer  # `recover_server` writes its weights again
        check_views(self._policy, self.weights)
        started = time.monotonic()
        self.weights.wait_until_written()  # a GPU finishes the step before the pause begins
        version = self._publish(step)
        seconds = time.monotonic() - started
        return Published(version, seconds, alignment=self._check_if_due(step))

    def _check_if_due(self, step: int) -> Alignment | None:
        """Check the server. None if no check is due."""
        if self._check is None or (step > 1 and step % self._verify_every_steps):
            return None
        require_written(self._optimizer, step - 1)
        return self._check.require(None, f"After step {step - 1}")

    def recover_server(self) -> None:
        """If the server stopped, wait for its return and write the weights back.

        Raises:
            LostServer: it did not come back in time.
        """
        if self._server.is_lost():
            self._crashes += 1
            self._reattach("the server closed the connection")
            self._publish(self._version.step)

    def crashes(self) -> int:
        return self._crashes + self._server.is_lost()

    def await_serving(self) -> None:
        self.recover_server()

    def close(self) -> None:
        self._server.close()
        self.bridge.close()

    def _publish(self, step: int) -> PolicyVersion:
        """Publish the master weights as the weights of `step`, on a restarted server if necessary.

        A server that is stopping may still accept a connection and then fail, so failures are
        retried until the deadline.
        """
        deadline = Deadline(self._server.return_deadline_s)
        while True:
            if self._server.is_lost():
                self._reattach("the server closed the connection")
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
        """pause → write → name the version → resume.

        The lease is renewed when the write begins, and when half of it is over. A process that was
        stopped while it wrote, and that another trainer has replaced, is refused then: it writes
        nothing more, and the server knows that the weights may be torn.
        """
        session = self._server.attachment.session
        pause = partial(self.bridge.pause, session, self._lease_s, version)
        lease = Deadline(0.0)  # expired: the first `may_write` pauses again, with `writing`

        def may_write() -> None:
            nonlocal lease
            if lease.has_passed:
                lease = Deadline(pause(writing=True) / 2)

        try:
            pause(writing=False)
            self._optimizer.write_into_parameters(may_write)
            self.weights.wait_until_written()
            self.bridge.resume(session, written=True)
        except BaseException:
            # The memory may hold part of the update. Once the connection closes, the server samples
            # nothing until all weights are written.
            self._server.close()
            raise

    def _reattach(self, why: str) -> None:
        release_views(self._policy)
        attachment = self._server.reattach(why)
        move_views(self._policy, attachment.weights)
        if frozen_checksum(self._policy) != self._frozen:
            raise PolicyMismatch(
                "the restarted server loaded --model from disk, and its frozen weights differ from "
                "the frozen weights of this run, because this run began with the weights of an "
                "earlier trainer. Start the run again with --resume never"
            )
        self._version = _usable_after(self._version, attachment.info)

    def _refuse_torn(self, info: BridgeInfo) -> None:
        if not info.weights_intact:
            raise TornWeights(
                f"the previous trainer may have died while it was writing, so the server at "
                f"{self.bridge.base_url} may hold part of an update. Restart the server, so that "
                "it loads its model files again, or resume from a checkpoint (--resume auto)"
            )

    def _check_is_about_the_session(self, error: Exception, version: PolicyVersion) -> None:
        """Raise errors that attaching again cannot repair: all but conflicts and broken
        connections."""
        if isinstance(error, RequestRefused) and error.status != _CONFLICT:
            raise WeightSyncError(
                f"cannot publish policy version {tuple(version)}: {error}. Check that "
                "--vllm-control-url names the server's control port"
            ) from error


def _usable_after(ours: PolicyVersion, info: BridgeInfo) -> PolicyVersion:
    """The trainer's version; in a new epoch if the server already used it.

    A restarted server accepts exactly the version that it lost; every other version can be used
    only once.
    """
    served = info.policy_version
    is_taken = served > ours or (served == ours and not info.awaiting_weights)
    return PolicyVersion(served.epoch + 1, ours.step) if is_taken else ours


def _log_starting_weights(info: BridgeInfo) -> None:
    if info.awaiting_weights:
        log.warning(
            "weights.lost",
            lost_policy_version=info.policy_version,
            hint="training starts from the server's model files; to resume, pass --resume auto",
        )
    elif info.policy_version != (0, 0):
        log.warning(
            "weights.inherited",
            policy_version=info.policy_version,
            hint="they are an earlier trainer's; restart the server to start from its model files",
        )
