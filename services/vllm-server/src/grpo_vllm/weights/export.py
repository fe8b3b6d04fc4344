"""The worker's weight memory as the server hands it out."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from grpo_core.errors import GrpoError
from grpo_core.weights.manifest import WeightManifest
from grpo_core.weights.transport import CudaMemory, MemfdMemory, WeightGrant


class NotExported(GrpoError):
    """The worker cannot give its memory to this consumer. The message says why."""


@dataclass(frozen=True)
class ExportedWeights:
    """`manifest`: what lies where. `fd`: this process's descriptor of the worker's arena; None on a
    GPU, where the worker exports its memory anew for every trainer."""

    engine: Any
    manifest: WeightManifest
    fd: int | None

    async def grant(self, session: str) -> tuple[WeightGrant, int | None]:
        """For one trainer: the record, and the descriptor that goes with it.

        Raises:
            NotExported: not now.
        """
        memory: MemfdMemory | CudaMemory = MemfdMemory()
        if self.fd is None:
            (answer,) = await self.engine.collective_rpc("export_weights")
            if "refused" in answer:
                raise NotExported(answer["refused"])
            memory = CudaMemory.model_validate_json(answer["memory"])
        return WeightGrant(session=session, manifest=self.manifest, memory=memory), self.fd


async def exported_by_worker(engine: Any) -> ExportedWeights:
    """Ask the worker process, which is our child, for what it shares.

    Raises:
        OSError: the worker's descriptor cannot be opened.
    """
    (worker,) = await engine.collective_rpc("describe_weights")
    manifest = WeightManifest.model_validate_json(worker["manifest"])
    fd = None
    if "fd" in worker:
        fd = os.open(f"/proc/{worker['pid']}/fd/{worker['fd']}", os.O_RDWR | os.O_CLOEXEC)
    return ExportedWeights(engine, manifest, fd)
