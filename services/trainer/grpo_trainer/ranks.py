"""The trainer's processes (ranks), and what they exchange: tensors and plain values, never objects.

Every exchange has a deadline. If a process ends, its connections close, and the exchange of every
other process ends with `LostRank`.

A lost process does not make an exchange over NCCL raise: the exchange returns before it is done,
and the GPU waits, with the main thread, until the deadline of the group. So a thread of each rank
also adds up a few numbers over gloo, whose connections close when a process ends: the heartbeat.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import structlog
import torch
import torch.distributed as dist
from pydantic import SecretStr
from torch import Tensor

from grpo_core.tree.optim import ProcessOptions
from grpo_core.tree.trainer import AUTO_DEVICE, TrainerSettings
from grpo_trainer.errors import EXIT_FAILED, EXIT_LOST, LostRank

LEADER = 0
"""The rank that exchanges data with other services, and writes all files."""
GLOO, BOTH = "gloo", "cpu:gloo,cuda:nccl"
_LIBRARIES = ("gloo", "NCCL")
T = TypeVar("T")
S = TypeVar("S", bound=TrainerSettings)

_TEXT_BYTES = 512
END, SAVE, LOAD, STOP = "end", "save", "load", "stop"
"""Orders. END is the last of some."""


@dataclass(frozen=True)
class Ranks:
    """This process as one of `count`. Every rank must call the same methods in the same order. A
    single process exchanges nothing: what it passes comes back as it is.

    Args:
        group: of all ranks, for one thread; None: that of the main thread
    """

    count: int = 1
    index: int = LEADER
    deadline_s: float = 0.0
    group: dist.ProcessGroup | None = None

    @property
    def leads(self) -> bool:
        return self.index == LEADER

    def apart(self) -> Ranks:
        """The same ranks, for exchanges over gloo in a thread. All call it in their main thread."""
        timeout = timedelta(seconds=self.deadline_s)
        return replace(self, group=dist.new_group(backend=GLOO, timeout=timeout))

    def total(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over all ranks, in place."""
        return self._reduced(tensor, dist.ReduceOp.SUM, "a sum")

    def begin_total(self, tensor: Tensor) -> Callable[[], object]:
        """Begin to add up a tensor over all ranks, in place. The result waits for it."""
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        return lambda: work.wait()

    def maximum(self, tensor: Tensor) -> Tensor:
        """The largest of each element over all ranks, in place."""
        return self._reduced(tensor, dist.ReduceOp.MAX, "a maximum")

    def from_leader(self, tensor: Tensor, what: str = "a tensor") -> Tensor:
        """Replace a tensor by the leader's, in place."""
        if self.count > 1:
            with self.exchange(f"waiting for {what} of rank {LEADER}"):
                dist.broadcast(tensor, src=LEADER, group=self.group)
        return tensor

    def broadcast(self, value: T, what: str = "a value") -> T:
        """The leader's value, on every rank: None, numbers, texts and tensors in host memory, and
        lists, tuples and dictionaries of them. Args: value: not read on other ranks"""
        if self.count == 1:
            return value
        written = io.BytesIO()
        if self.leads:
            torch.save(value, written)
        raw = torch.frombuffer(bytearray(written.getvalue()) or bytearray(1), dtype=torch.uint8)
        size = int(self.from_leader(torch.tensor([len(raw)]), what))
        raw = self.from_leader(raw if self.leads else torch.empty(size, dtype=torch.uint8), what)
        if self.leads:
            return value
        found: T = torch.load(io.BytesIO(raw.numpy().tobytes()), weights_only=True)
        return found

    def gathered(self, text: str) -> list[str]:
        """The text of each rank, cut off after 512 bytes."""
        if self.count == 1:
            return [text]
        raw = text.encode()[:_TEXT_BYTES]
        sent = torch.zeros(self.count, _TEXT_BYTES, dtype=torch.uint8)
        sent[self.index, : len(raw)] = torch.tensor([*raw], dtype=torch.uint8)
        rows = self.total(sent).tolist()
        return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in rows]

    def portion(self, items: Sequence[T], filling: T) -> list[T]:
        """This rank's part of a sequence; `filling` completes it, so that all parts have the same
        length. Item i belongs to rank i modulo `count`."""
        own = [*items[self.index :: self.count]]
        return own + [filling] * (-(-len(items) // self.count) - len(own))

    def joined(self, items: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """The tensors of all ranks, in the order of the items that `portion` divided.

        Args:
            items: flat, of this rank's part and its filling, in host memory
            sizes: of each item on any rank
        """
        if self.count == 1:
            return [*items]
        flat = torch.zeros(sum(sizes))
        places = torch.split(flat, list(sizes))
        for place, item in zip(places[self.index :: self.count], items, strict=False):
            place.copy_(item)
        self.total(flat)  # each place is 0 on all ranks but one
        return [*places]

    def seed(self, seed: int, step: int) -> None:
        """Seed the random numbers of dropout on the ranks above 0, whose generators no checkpoint
        holds. Rank 0 has its own from the checkpoint."""
        if not self.leads:
            torch.manual_seed(random.Random(f"{seed}/{step}/{self.index}").getrandbits(63))

    @contextlib.contextmanager
    def exchange(self, what: str) -> Iterator[None]:
        """Raises `LostRank` if the block fails because another process ended or is too late."""
        try:
            yield
        except RuntimeError as error:
            is_lost = isinstance(error, dist.DistError) or any(
                name in str(error) for name in _LIBRARIES
            )
            if not is_lost:
                raise
            reason = str(error).splitlines()[0]
            raise LostRank(
                f"rank {self.index} of {self.count}, {what}: another trainer process ended, or did "
                f"not answer for {self.deadline_s:g} s (--rank-deadline-s). The other process's "
                f"log has the cause; then start all processes again ({reason})"
            ) from error

    def _reduced(self, tensor: Tensor, how: dist.ReduceOp.RedOpType, what: str) -> Tensor:
        if self.count > 1:
            with self.exchange(f"computing {what} over all ranks"):
                dist.all_reduce(tensor, op=how, group=self.group)
        return tensor


ALONE = Ranks()


class Orders:
    """What the other ranks do while rank 0 works alone: some of its work needs all of them, and
    gives an order.

    Attributes:
        actions: by name; each takes a number
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.actions: dict[str, Callable[[int], object]] = {}
        self.are_followed = False

    def begin(self) -> None:
        """Rank 0 works alone from here to `end`, while the other ranks call `follow`."""
        self.are_followed = self.ranks.leads and self.ranks.count > 1

    def give(self, name: str, number: int = 0) -> None:
        """Let the other ranks do it at the same time, if they follow."""
        if self.are_followed:
            self.ranks.broadcast((name, number))

    def end(self) -> None:
        self.give(END)
        self.are_followed = False

    def follow(self) -> None:
        """Called on ranks above 0, until rank 0 calls `end`."""
        while True:
            order: tuple[str, int] = self.ranks.broadcast(("", 0), "an order")
            name, number = order
            if name == END:
                return
            self.actions[name](number)


def join(options: ProcessOptions) -> Ranks:
    """Wait until all processes are there.

    Raises:
        LostRank: one of them did not come.
    """
    ranks = Ranks(options.world_size, options.trainer_rank, options.rank_deadline_s)
    # Batches are in host memory: gloo, which notices at once if a process ends.
    backend = BOTH if torch.cuda.is_available() and dist.is_nccl_available() else GLOO
    with ranks.exchange(f"meeting the other ranks at {options.init_method}"):
        dist.init_process_group(
            backend,
            init_method=options.init_method,
            world_size=ranks.count,
            rank=ranks.index,
            timeout=timedelta(seconds=ranks.deadline_s),
        )
        dist.barrier()
    return ranks


def settings_of_leader(settings: TrainerSettings, ranks: Ranks) -> TrainerSettings:
    """Rank 0's settings, without its secrets, with the model as this host names it."""
    if ranks.count == 1:
        return settings
    secret = {name for name, value in settings if isinstance(value, SecretStr)}
    text = ranks.broadcast(settings.model_dump_json(exclude=secret), "the settings")
    if ranks.leads:
        return settings
    found = TrainerSettings.model_validate_json(text)
    return found.model_copy(update={"model": settings.model})


def settings_of_rank(settings: S, options: ProcessOptions) -> S:
    """The settings with this process's GPU, if there are several processes and GPUs."""
    if options.world_size == 1 or not torch.cuda.is_available():
        return settings
    if settings.device not in (AUTO_DEVICE, "cuda"):
        return settings
    local = options.trainer_rank if options.local_rank is None else options.local_rank
    return settings.model_copy(update={"device": f"cuda:{local}"})


BEAT_S = 1.0
"""Time between two exchanges."""
SILENT_S = 60.0
"""A process that does not take part for this time is lost: stopped, or its host is."""
GRACE_S = 10.0
"""Time that the main thread has to end by itself, by the error of an exchange over gloo."""
WELL, STOPPED, FAILED = 0, 1, 2
"""How a rank has left the block of `beating`: STOPPED by a signal or because of another rank."""

log = structlog.get_logger()


class Heartbeat:
    """Args: beat_s, silent_s, grace_s: as the constants"""

    def __init__(
        self,
        ranks: Ranks,
        beat_s: float = BEAT_S,
        silent_s: float = SILENT_S,
        grace_s: float = GRACE_S,
    ) -> None:
        self._ranks = ranks
        self._beat_s, self._silent_s, self._grace_s = beat_s, silent_s, grace_s
        self._group = dist.new_group(backend=GLOO, timeout=timedelta(seconds=silent_s))
        self._is_over = threading.Event()
        self._left_as = WELL
        self._has_error = False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """All ranks enter and leave the block. A rank that leaves it with an error is named by the
        others. If one is lost, this process ends.

        Raises:
            LostRank: `is_final` if another rank ended by an error.
        """
        self._thread.start()
        self._left_as = STOPPED
        try:
            yield
            self._left_as = WELL
        except LostRank as error:
            self._finish()
            error.is_final = self._has_error
            raise
        except Exception:
            self._left_as = FAILED
            raise
        finally:
            self._finish()

    def _finish(self) -> None:
        self._is_over.set()
        # A lost rank keeps the thread; this one ends with its own error.
        self._thread.join(2 * self._beat_s if self._left_as else None)

    def _run(self) -> None:
        lost = self._first_lost()
        if lost is None:
            return
        log.error("rank.lost", rank=self._ranks.index, reason=lost)
        time.sleep(self._grace_s)
        message = (
            f"rank {self._ranks.index} of {self._ranks.count}: {lost}. Its log has the cause; then "
            "start all processes again"
        )
        log.error(LostRank.__name__, reason=message)
        # The main thread waits for the lost process, in an exchange.
        os._exit(EXIT_FAILED if self._has_error else EXIT_LOST)

    def _first_lost(self) -> str | None:
        """Exchange beats until all ranks are over (None), or one is lost."""
        while True:
            # The number of ranks that are over, and then how each rank has left.
            beats = torch.zeros(1 + self._ranks.count, dtype=torch.int64)
            is_over = self._is_over.is_set()
            left_as = self._left_as if is_over else WELL
            beats[0], beats[1 + self._ranks.index] = int(is_over), left_as
            try:
                dist.all_reduce(beats, group=self._group)
            except RuntimeError:
                return (
                    "another trainer process ended, or did not answer for "
                    f"{self._silent_s:g} s; it may be out of memory"
                )
            over, *left = beats.tolist()
            if left_as:
                return None
            if worst := max(left):
                self._has_error = worst == FAILED
                how = "an error" if self._has_error else "a signal"
                return f"rank {left.index(worst)} ended early, by {how}"
            if over == self._ranks.count:
                return None
            self._is_over.wait(self._beat_s)


@contextlib.contextmanager
def process_group(options: ProcessOptions) -> Iterator[Ranks]:
    """This process among the trainer's processes, which begin and end the block together.

    Raises:
        LostRank: another process ended. An error on one rank ends all ranks.
    """
    if options.world_size == 1:
        yield ALONE
        return
    ranks = join(options)
    with Heartbeat(ranks).beating(), ranks.exchange("training"):
        yield ranks
    dist.destroy_process_group()
