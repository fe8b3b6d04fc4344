"""Digests of the master weights, computed in a thread from one update to the next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from grpo_core.provenance.digest import TENSOR_DIGITS, joined, tensor_digest
from grpo_core.provenance.records import Facts
from grpo_trainer.atomic_files import DTYPES, PART_BYTES
from grpo_trainer.ranks import Ranks

_BYTES = TENSOR_DIGITS // 2


class WeightDigests:
    """All ranks begin and finish together. The weights must not change in between.

    Args:
        masters: this rank's
        parts: number of ranks among which each tensor is divided; 1 if rank 0 has all
    """

    def __init__(self, masters: Sequence[Tensor], ranks: Ranks, parts: int = 1) -> None:
        self._masters, self._ranks, self._parts = masters, ranks, parts
        self._pending: Future[list[str]] | None = None
        self._thread = ThreadPoolExecutor(1, "digests")

    def begin(self) -> None:
        """Compute the digests of the weights as they are now."""
        if self._ranks.leads or self._parts > 1:
            self._pending = self._thread.submit(self._computed, _after_queued_work(self._masters))

    def finish(self) -> list[str] | None:
        """The digest of each tensor. None on ranks above 0, or if none were begun."""
        if self._pending is None:
            return None
        own, self._pending = self._pending.result(), None
        if self._parts == 1:
            return own
        sent = torch.zeros(self._parts, len(own), _BYTES, dtype=torch.uint8)
        rows = [list(bytes.fromhex(digest)) for digest in own]
        sent[self._ranks.index] = torch.tensor(rows, dtype=torch.uint8)
        whole = self._ranks.total(sent).tolist()
        if not self._ranks.leads:
            return None
        parts = [[bytes(row).hex() for row in part] for part in whole]
        return [joined(of_ranks) for of_ranks in zip(*parts, strict=True)]

    def _computed(self, stream: Any) -> list[str]:
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            return [tensor_digest(_pieces(master)) for master in self._masters]


def digests_of(masters: Sequence[Tensor], parts: int) -> list[str]:
    """The digest of each whole tensor, as `parts` ranks that divide its rows compute it."""
    return [joined([tensor_digest(_pieces(part)) for part in _rows(m, parts)]) for m in masters]


def _rows(whole: Tensor, parts: int) -> list[Tensor]:
    """As FSDP2 divides them: the last ranks may have none."""
    found = whole.chunk(parts)
    return [*found, *[whole[:0]] * (parts - len(found))]


def facts_of(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> list[Facts]:
    """Args: shapes: of the whole tensors, by name; dtype: of the master weights"""
    return [(name, DTYPES[str(dtype)], shape) for name, shape in shapes.items()]


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    for part in torch.split(tensor.detach().reshape(-1).view(torch.uint8), PART_BYTES):
        yield part.cpu().numpy().data


def _after_queued_work(masters: Sequence[Tensor]) -> Any:
    """On a GPU, a stream of its own, in which copies do not wait for the next step."""
    device = masters[0].device
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream
