"""The trainer's hold on the inference server's memory, and how it is taken again."""

from __future__ import annotations

import time

import structlog

from grpo_core.clients.inference import BridgeClient
from grpo_core.errors import ServiceUnavailable
from grpo_core.process.closing import ClosesOnExit
from grpo_trainer.errors import LostServer, PolicyMismatch, WeightSyncError
from grpo_trainer.model.loading import require_device
from grpo_trainer.weight_sync.shared_memory.attachment import Attachment, WeightPlaces, attach
from grpo_trainer.weight_sync.shared_memory.views import MappedWeights

log = structlog.get_logger()

RETURN_DEADLINE_S = 300.0
RETURN_POLL_S = 0.5
_RETURN_ATTEMPT_S = 5.0


class ServerHold(ClosesOnExit):
    """At most one attachment at a time.

    Args:
        bridge: control client of the server
        places: where its weight socket is
        dtype: what the server must hold; "auto": whatever it holds
        device: where the server must hold it; "auto": wherever it does
        return_deadline_s: how long a server that went away may take to come back
    """

    def __init__(
        self,
        bridge: BridgeClient,
        places: WeightPlaces,
        dtype: str,
        device: str,
        return_deadline_s: float,
    ) -> None:
        self._bridge = bridge
        self._places = places
        self._dtype = dtype
        self._device = device
        self.return_deadline_s = return_deadline_s
        self._attachment: Attachment | None = None
        bridge.give_up_if(self.is_lost)

    def is_lost(self) -> bool:
        """Has the server ended whose memory is held?"""
        return self._attachment is not None and self._attachment.is_lost()

    @property
    def attached(self) -> bool:
        return self._attachment is not None

    @property
    def attachment(self) -> Attachment:
        if self._attachment is None:
            raise WeightSyncError("not attached: load_policy() comes first")
        return self._attachment

    def take(self) -> Attachment:
        """Attach for the first time.

        Raises:
            ServiceUnavailable: no server, or no weight socket.
            PolicyMismatch: the server shares nothing, or with another data type or device.
        """
        return self._take(deadline_s=None)

    def take_again(self, why: str) -> Attachment:
        """Wait for a server that went away.

        Raises:
            LostServer: it did not come back in time.
            PolicyMismatch: it came back with another data type.
        """
        log.warning(
            "lost the inference server; waiting for its return",
            why=why,
            deadline_s=self.return_deadline_s,
        )
        self.close()
        started = time.monotonic()
        while True:
            try:
                attachment = self._take(_RETURN_ATTEMPT_S)
            except ServiceUnavailable as error:
                if time.monotonic() - started >= self.return_deadline_s:
                    raise self.gone_for_good(str(error)) from error
                time.sleep(RETURN_POLL_S)
            else:
                log.info(
                    "attached again; writing the current weights back",
                    seconds=round(time.monotonic() - started, 1),
                    generation=attachment.weights.manifest.generation,
                )
                return attachment

    def close(self) -> None:
        """Let go. The weights served last stay served."""
        if self._attachment is not None:
            self._attachment.close()
            self._attachment = None

    def gone_for_good(self, what: str) -> LostServer:
        return LostServer(
            f"the inference server at {self._bridge.base_url} went away and did not come back "
            f"within {self.return_deadline_s:g} s ({what}); read its log, start it again, then "
            "the trainer"
        )

    def _take(self, deadline_s: float | None) -> Attachment:
        self._attachment = attach(self._bridge, self._places, deadline_s)
        self._check_dtype(self._attachment.weights)
        require_device(self._device, self._attachment.weights.device)
        return self._attachment

    def _check_dtype(self, weights: MappedWeights) -> None:
        if self._dtype not in ("auto", weights.dtype_name):
            raise PolicyMismatch(
                f"--dtype {self._dtype}, but the server holds {weights.dtype_name}; start both "
                "with the same, or the trainer with --dtype auto"
            )
