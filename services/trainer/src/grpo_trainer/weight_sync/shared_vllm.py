"""Mode `shared_vllm`: trainer and server hold one copy of the weights.

This file alone may pause the server, write the weights, name the new version and resume.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import structlog

from grpo_core.errors import RequestRefused
from grpo_core.inference_client import BridgeClient
from grpo_core.weight_socket import WeightConnection, connect_weights
from grpo_core.wire import PolicyVersion
from grpo_trainer.errors import LostServer, PolicyMismatch, TornWeights, WeightSyncError
from grpo_trainer.optimizer import MasterOptimizer
from grpo_trainer.weight_sync.base import Published
from grpo_trainer.weight_sync.shared_views import MappedWeights, build_policy, check_views

log = structlog.get_logger()


class SharedVllm:
    """Args: bridge: control client of the server; socket: its weight socket, None to ask it."""

    def __init__(
        self,
        bridge: BridgeClient,
        model_name: str,
        socket: Path | None,
        dtype: str,
        lease_s: float,
    ) -> None:
        self._bridge = bridge
        self._model_name = model_name
        self._socket = socket
        self._dtype = dtype
        self._lease_s = lease_s
        self._connection: WeightConnection | None = None
        self._weights: MappedWeights | None = None
        self._policy: Any = None
        self._epoch = 0

    @property
    def attached(self) -> bool:
        return self._connection is not None

    @property
    def weights(self) -> MappedWeights:
        assert self._weights is not None, "load_policy() comes first"
        return self._weights

    def load_policy(self) -> Any:
        """Attach to the server's memory and build the policy of views into it.

        Raises:
            ServiceUnavailable: no server, or no weight socket.
            PolicyMismatch: the server shares nothing, or another model.
            TornWeights: a trainer before this one was cut off while it wrote.
        """
        info = self._bridge.info()
        if info.weights_socket is None:
            raise PolicyMismatch(
                f"the server at {self._bridge.base_url} shares no weights; start vllm-api-server "
                "with --share-weights"
            )
        self._connection = connect_weights(self._socket or Path(info.weights_socket))
        # Asked again at the door: the trainer before may have been cut off in the meantime, but
        # nobody else writes from here on.
        info = self._bridge.info()
        if not info.weights_intact:
            raise TornWeights(
                f"the trainer before this one was cut off while it may have been writing: the "
                f"server at {self._bridge.base_url} may hold half an update. Restart the server, "
                "which loads its checkpoint again"
            )
        manifest = self._connection.grant.manifest
        self._weights = MappedWeights.from_fd(self._connection.fd, manifest)
        served_dtype = str(self._weights.dtype).removeprefix("torch.")
        if self._dtype not in ("auto", served_dtype):
            raise PolicyMismatch(
                f"--dtype {self._dtype}, but the server holds {served_dtype}; start both with the "
                "same, or the trainer with --dtype auto"
            )
        self._policy = build_policy(self._model_name, self._weights)
        self._epoch = info.policy_version[0] + 1
        if info.policy_version != (0, 0):
            log.warning(
                "an earlier trainer has updated this server; training goes on from its weights",
                policy_version=info.policy_version,
            )
        log.info(
            "attached to the server's weights",
            generation=manifest.generation,
            megabytes=round(manifest.total_bytes / 1e6, 1),
            dtype=served_dtype,
        )
        return self._policy

    def start(self, optimizer: MasterOptimizer, step: int) -> PolicyVersion:
        """Write the masters back and announce them under a new epoch."""
        version = PolicyVersion(self._epoch, step)
        self._publish(optimizer, version)
        return version

    def apply(self, optimizer: MasterOptimizer, step: int) -> Published:
        """Step on the masters while serving goes on, then write them into the served weights.

        Raises:
            MovedParameters: the policy is no longer made of views; nothing was written.
            NonFiniteGradient: nothing was written.
            LostServer: the server restarted or the lease ran out.
        """
        check_views(self._policy, self.weights)
        started = time.monotonic()
        grad_norm = optimizer.step(step)
        stepped = time.monotonic()
        version = PolicyVersion(self._epoch, step + 1)
        self._publish(optimizer, version)
        return Published(
            version=version,
            grad_norm=grad_norm,
            optimizer_s=stepped - started,
            publish_s=time.monotonic() - stepped,
        )

    def served_logprobs(self, token_ids: list[int]) -> list[float]:
        return self._bridge.prompt_logprobs(token_ids)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._bridge.close()

    def _publish(self, optimizer: MasterOptimizer, version: PolicyVersion) -> None:
        """pause → write → name → resume."""
        connection = self._live_connection()
        session = connection.grant.session
        try:
            self._bridge.pause(session, self._lease_s, version)
            optimizer.write_into_parameters()
            self._bridge.resume(session, written=True)
        except RequestRefused as error:
            raise LostServer(f"cannot publish version {tuple(version)}: {error}") from error
        except BaseException:
            # The write may be half done. Closing the connection makes the server go on and stop
            # calling these weights by a version that a trainer chose.
            self.close()
            raise

    def _live_connection(self) -> WeightConnection:
        if self._connection is None:
            raise WeightSyncError("not attached: load_policy() comes first")
        if self._connection.server_has_closed():
            raise LostServer(
                f"the inference server at {self._bridge.base_url} is gone or restarted; its memory "
                "is no longer ours. Start the trainer again once it is up"
            )
        return self._connection
