"""Draws the curves of a run to `metrics.png`."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_offline.results import Metrics, evaluations, train_records
from grpo_offline.run_files import RunFiles

_SIZE_INCHES, _DPI = (10.0, 6.5), 110
_LOSSES = {"loss_total": "total", "loss_pg": "policy", "loss_kl": "KL", "loss_entropy": "entropy"}


def draw(files: RunFiles) -> None:
    """Rewards and evaluations, losses, the KL divergence, the gradient norm; by iteration."""
    from matplotlib.figure import Figure

    records = train_records(files)
    figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained")
    (rewards, losses), (divergence, gradient) = figure.subplots(2, 2)
    _reward_panel(rewards, files, records)
    for name, label in _LOSSES.items():
        _line(losses, records, name, label)
    losses.set_title("loss")
    _line(divergence, records, "kl_divergence", "KL divergence (nats per token)")
    _line(divergence, records, "kl_coef", "coefficient")
    divergence.set_title("KL penalty")
    _line(gradient, records, "grad_norm", "gradient norm")
    gradient.set_title("gradient norm before clipping")
    for axes in (rewards, losses, divergence, gradient):
        axes.set_xlabel("iterations")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small", frameon=False)
    figure.savefig(files.plot)


def _reward_panel(axes: object, files: RunFiles, records: Sequence[Metrics]) -> None:
    _line(axes, records, "reward_mean", "reward of the rollouts")
    found = evaluations(files)
    for index, first in enumerate(found[0][1] if found else ()):
        points = [(done, tasks[index]["mean@1"]) for done, tasks in found]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=_label(first))  # type: ignore[attr-defined]
    axes.set_title("reward")  # type: ignore[attr-defined]


def _label(metrics: Metrics) -> str:
    return f"mean@1, {metrics['task']}"


def _line(axes: object, records: Sequence[Metrics], name: str, label: str) -> None:
    points = [(r["iteration"] + 1, r[name]) for r in records if r.get(name) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), label=label)  # type: ignore[attr-defined]
