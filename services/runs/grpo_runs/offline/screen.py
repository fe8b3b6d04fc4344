"""What a run prints: its beginning, a line per iteration under a bar, and its results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from grpo_core.cpu import share_cores
from grpo_core.evaluation.results import EvalResult
from grpo_core.logs import configure_logging
from grpo_runs.offline.key_names import renamed
from grpo_runs.offline.keys import OfflineKeys

_HEAD_EVERY = 20
_IDLE = 5e-7
"""Losses smaller than this are rounding: the policy's is 0 on fresh rollouts."""
_COLUMNS = ("iteration", "reward", "loss", "kl", "kl coef", "grad norm", "seconds", "mean@1")
_WIDTH = 10


class OfflineScreen:
    """Args: console: where to print; a bar is drawn only on a terminal"""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._lines = 0

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def warn(self, text: str) -> None:
        self._console.print(f"warning: {text}", markup=False, style="yellow")

    @contextlib.contextmanager
    def bar(self, done: int, total: int) -> Iterator[Progress]:
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        ) as progress:
            progress.add_task("iterations", total=total, completed=done)
            yield progress

    def iteration(
        self, record: Mapping[str, Any], total: int, seconds: float, results: Sequence[EvalResult]
    ) -> None:
        if self._lines % _HEAD_EVERY == 0:
            self.say("".join(f"{name:>{_WIDTH}}" for name in _COLUMNS))
        self._lines += 1
        divergence = record["kl_divergence"]
        cells = [
            f"{record['iteration']}/{total - 1}",
            f"{record['reward_mean']:.3f}",
            _shown_loss(record["loss_total"]),
            "-" if divergence is None else f"{divergence:.4f}",
            f"{record['kl_coef']:.3g}" if "kl_coef" in record else "-",
            f"{record['grad_norm']:.3f}",
            f"{seconds:.1f}",
            " ".join(f"{result.metrics['mean@1']:.3f}" for result in results) or "-",
        ]
        self.say("".join(f"{cell:>{_WIDTH}}" for cell in cells))

    def evaluated(
        self, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
    ) -> None:
        """Args: metrics of each task, in the same order"""
        for first, last in zip(before, after, strict=True):
            for name in [name for name in last if "@" in name]:
                change = last[name] - first[name]
                self.say(
                    f"{last['task']}: {name} {first[name]:.3f} to {last[name]:.3f} ({change:+.3f}) "
                    f"on {last['items']} items"
                )


def _shown_loss(value: float) -> str:
    """Without the sign of a rounding error."""
    return f"{0.0 if abs(value) < _IDLE else value:.4f}"


def open_screen(keys: OfflineKeys, names: Mapping[str, str] | None = None) -> OfflineScreen:
    """Prepare this process for a run: messages name the user's keys, and no other bar is drawn.

    Args: names: of a recipe's keys, by those of Hydra
    """
    configure_logging("offline", keys.logging.level, [renamed(names or {})])
    share_cores()
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    return OfflineScreen()
