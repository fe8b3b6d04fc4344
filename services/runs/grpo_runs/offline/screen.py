"""The screen of a run without services: what every command shows, and a line per iteration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from structlog.types import EventDict

from grpo_core.cpu import prepare_cpu
from grpo_core.evaluation.results import EvalResult
from grpo_core.logs import configure_logging
from grpo_runs.offline.keys import OfflineKeys, renamed
from grpo_runs.report.steps import HEADER_EVERY_STEPS, Column, cells, optional, titles
from grpo_runs.screen import Screen

_IDLE = 5e-7
"""Losses smaller than this are rounding: the policy's is 0 on fresh rollouts."""
_COLUMNS: Sequence[Column[Mapping[str, Any]]] = (
    Column("iteration", 10, lambda r: f"{r['iteration']}/{r['total'] - 1}"),
    Column("reward", 8, lambda r: f"{r['reward_mean']:.3f}"),
    Column("loss", 8, lambda r: _shown_loss(r["loss_total"])),
    Column("kl", 8, lambda r: optional(r["kl_divergence"], ".4f")),
    Column("kl coef", 8, lambda r: optional(r.get("kl_coef"), ".3g")),
    Column("grad norm", 9, lambda r: f"{r['grad_norm']:.3f}"),
    Column("seconds", 8, lambda r: f"{r['seconds']:.1f}"),
    Column("mean@1", 8, lambda r: " ".join(f"{score:.3f}" for score in r["scores"]) or "-"),
)


class OfflineScreen(Screen):
    def __init__(self, out: Console | None = None, err: Console | None = None) -> None:
        super().__init__(out, err)
        self._lines = 0
        self.doing = "loading the model"  # for which a long silence is
        self.warned = Counter[str]()

    def count(self, _: object, method: str, event: EventDict) -> EventDict:
        """A processor of structlog: counts warnings and errors by event."""
        self.warned.update([event["event"]] if method not in ("debug", "info") else [])
        return event

    def iteration(
        self, record: Mapping[str, Any], total: int, seconds: float, results: Sequence[EvalResult]
    ) -> None:
        if self._lines % HEADER_EVERY_STEPS == 0:
            self.line(titles(_COLUMNS))
        self._lines += 1
        scores = [result.metrics["mean@1"] for result in results]
        self.line(cells(_COLUMNS, {**record, "total": total, "seconds": seconds, "scores": scores}))


def _shown_loss(value: float) -> str:
    """Without the sign of a rounding error."""
    return f"{0.0 if abs(value) < _IDLE else value:.4f}"


def open_screen(keys: OfflineKeys, names: Mapping[str, str] | None = None) -> OfflineScreen:
    """Prepare this process for a run: messages name the user's keys, and no other bar is drawn.

    Args: names: of a recipe's keys, by those of Hydra
    """
    screen = OfflineScreen()
    configure_logging("offline", keys.logging.level, [renamed(names or {}), screen.count])
    prepare_cpu()
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    return screen
