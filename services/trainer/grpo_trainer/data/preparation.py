"""Checks and collates a batch as soon as it arrives, in the thread that requested it.

What depends on earlier batches, on the step or on the policy is left to the training loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from grpo_core.clients.run_api_answers import LeasedBatch
from grpo_core.wire.scored_group import ScoredGroup
from grpo_trainer.data.collate import Batch
from grpo_trainer.data.group_checks import UsableGroup
from grpo_trainer.data.group_filter import CheckedGroup, GroupFilter

log = structlog.get_logger()

UNUSED = ("distill_token_ids", "distill_logprobs")
Collate = Callable[[Sequence[UsableGroup]], Batch]


@dataclass(frozen=True)
class PreparedBatch:
    """`collated` has the groups `usable`, as if none of them were stale; None without any."""

    leased: LeasedBatch
    checked: list[CheckedGroup]
    usable: list[UsableGroup]
    collated: Batch | None


@dataclass(eq=False)
class Preparation:
    """Prepares batches, at most one of them ahead."""

    group_filter: GroupFilter
    collate: Collate

    def __post_init__(self) -> None:
        self._ahead: PreparedBatch | None = None
        self._named_unused = False

    def prepare_ahead(self, leased: LeasedBatch) -> None:
        """Prepare the batch for which `prepared` will be called next. May run in another thread
        that ends before that call."""
        self._ahead = self._prepared(leased)

    def prepared(self, leased: LeasedBatch) -> PreparedBatch:
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.leased is not leased:
            return self._prepared(leased)
        return ahead

    def collated(self, prepared: PreparedBatch, groups: Sequence[UsableGroup]) -> Batch:
        """Args: groups: all of `prepared.usable`, or fewer"""
        if prepared.collated is not None and len(groups) == len(prepared.usable):
            return prepared.collated
        return self.collate(groups)

    def _prepared(self, leased: LeasedBatch) -> PreparedBatch:
        self._name_unused_fields(leased.groups)
        checked = self.group_filter.check(leased.groups, leased.received_under)
        usable = [one.result for one in checked if isinstance(one.result, UsableGroup)]
        return PreparedBatch(leased, checked, usable, self.collate(usable) if usable else None)

    def _name_unused_fields(self, groups: Sequence[ScoredGroup]) -> None:
        """Log once if groups carry values that the trainer does not use."""
        carried = [name for name in UNUSED if any(getattr(g, name) is not None for g in groups)]
        if carried and not self._named_unused:
            self._named_unused = True
            log.warning(
                "fields.unused",
                fields=carried,
                reason="this trainer does not distil: it trains on scores and advantages alone",
            )
