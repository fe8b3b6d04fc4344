"""A dashboard for Grafana: docs/assets/grafana-dashboard.json."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders.common import (
    GraphThresholdsStyleConfig,
    StackingConfig,
    VizLegendOptions,
    VizTooltipOptions,
)
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DatasourceVariable,
    QueryVariable,
    Row,
    ThresholdsConfig,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.timeseries import Panel as TimeSeries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    GraphTresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
)

from grpo_core.alerts import ALERTS, RUN
from grpo_trainer.checks.findings import RANGES
from grpo_trainer.telemetry.prometheus import prometheus_name

OF_RUN = f'{RUN}=~"$run"'
SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")
COLUMNS, HEIGHT = 8, 7
"""Of a panel: a third of Grafana's 24 columns."""


@dataclass(frozen=True)
class Line:
    """`query`: `$` stands for the label that selects the run, as in `up{$}`."""

    query: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """Args:
    unit: one of Grafana's
    limit: where a line is drawn
    """

    title: str
    lines: Sequence[Line]
    unit: str = "short"
    limit: float | None = None
    stacked: bool = False


def _of(*metrics: str) -> list[Line]:
    """Metrics of the trainer's record, each with its name."""
    return [Line(f"{prometheus_name(metric)}{{$}}", metric) for metric in metrics]


def _range(metric: str) -> Panel:
    """With the bound that the trainer warns about."""
    (healthy,) = (each for each in RANGES if each.metric == metric)
    limit = healthy.high if healthy.low == 0 else healthy.low
    return Panel(metric, _of(metric), limit=None if math.isinf(limit) else limit)


def _alert(name: str) -> float:
    return next(alert.threshold for alert in ALERTS if alert.name == name)


REWARD_PARTS = Line('{__name__=~"grpo_trainer_reward_part_.*",$}', "{{__name__}}")
ROWS: dict[str, Sequence[Panel]] = {
    "Training": (
        Panel("Reward", [*_of("reward/mean"), REWARD_PARTS]),
        Panel("Loss", _of("train/loss", "train/loss_policy", "train/loss_kl")),
        Panel("Gradient norm", _of("train/grad_norm")),
        _range("grpo/effective_sample_fraction"),
        _range("grpo/clipped_fraction"),
        Panel("Entropy and KL", _of("policy/entropy", "policy/reference_kl", "alignment/kl_k3")),
        Panel(
            "Difference of logprobs",
            _of("alignment/fresh_diff_abs_mean", "alignment/probe_abs_mean"),
        ),
        Panel("Groups without signal", _of("reward/zero_variance_fraction"), "percentunit"),
        Panel("Tokens of a completion", _of("rollout/completion_tokens_mean")),
    ),
    "Speed": (
        Panel(
            "Time of a step",
            _of(
                "train/data_fetch_time",
                "train/compute_time",
                "train/sync_time",
                "train/save_time",
            ),
            "s",
            stacked=True,
        ),
        Panel("Tokens per second, trained", _of("throughput/tokens_per_s", "train/tokens_per_s")),
        Panel("Share of the device's rate (MFU)", _of("train/mfu"), "percentunit"),
        Panel("Ranks that wait for others", _of("train/rank_idle_fraction"), "percentunit"),
        Panel(
            "Tokens per second, sampled",
            [Line("rate(vllm:generation_tokens_total{$}[1m])", "{{instance}}")],
        ),
        Panel(
            "Steps per minute",
            [Line("60 * rate(grpo_trainer_steps_taken_total{$}[5m])", "steps")],
        ),
        Panel(
            "Since the last step",
            [Line("time() - grpo_trainer_last_step_timestamp_seconds{$}", "seconds")],
            "s",
            _alert("no-training-step"),
        ),
        Panel("Stage", [Line("grpo_trainer_stage{$}", "{{stage}}")], stacked=True),
    ),
    "Data": (
        Panel("Staleness", _of("staleness/mean", "staleness/max"), limit=_alert("staleness-high")),
        Panel("Queue", [Line(f"max by ({RUN}) (run_api_queued_groups{{$}})", "groups")]),
        Panel(
            "Age of the oldest",
            [
                Line("run_api_oldest_queued_group_age_seconds{$}", "queued group"),
                Line("run_api_oldest_lease_age_seconds{$}", "lease"),
            ],
            "s",
        ),
        Panel(
            "Groups per second",
            [Line("rate(grpo_environment_groups_sent_total{$}[1m])", "sent, {{instance}}")],
        ),
        Panel(
            "Lost groups per second",
            [
                Line(
                    "sum by (reason) (rate(grpo_environment_groups_lost_total{$}[1m]))",
                    "{{reason}}",
                ),
                Line("rate(run_api_refused_groups_total{$}[1m])", "refused by run-api"),
            ],
        ),
        Panel(
            "Dropped by the trainer",
            [
                Line(f"{prometheus_name(f'data/{kind}_groups')}{{$}}", f"{kind} groups")
                for kind in ("unusable", "repeated", "stale")
            ],
        ),
    ),
    "Services": (
        Panel(
            "Environments and servers",
            [
                Line(f"max by ({RUN}) (run_api_environments_alive{{$}})", "environments"),
                Line(f"max by ({RUN}) (run_api_servers{{$}})", "servers"),
            ],
        ),
        Panel(
            "Served step",
            [
                Line(f"max by ({RUN}, server) (run_api_server_step{{$}})", "{{server}}"),
                *_of("step"),
            ],
        ),
        Panel(
            "Engine restarts and crashes",
            [
                Line(f"max by ({RUN}, server) (run_api_server_{kind}_total{{$}})", legend)
                for kind, legend in (
                    ("restarts", "{{server}}: restarts"),
                    ("crashes", "{{server}}: crashes"),
                )
            ],
        ),
        Panel(
            "Requests at the servers",
            [
                Line("vllm:num_requests_running{$}", "running, {{instance}}"),
                Line("vllm:num_requests_waiting{$}", "waiting, {{instance}}"),
            ],
        ),
        Panel("KV cache", [Line("vllm:kv_cache_usage_perc{$}", "{{instance}}")], "percentunit"),
        Panel(
            "Memory",
            [Line("process_resident_memory_bytes{$}", "{{job}}, {{instance}}")],
            "bytes",
        ),
        Panel(
            "Disk",
            [
                Line("grpo_trainer_disk_free_bytes{$}", "free, of checkpoints"),
                Line("run_api_redis_append_only_file_bytes{$}", "used by Redis"),
            ],
            "bytes",
        ),
        Panel("Firing alerts", [Line('ALERTS{alertstate="firing",$}', "{{alertname}}")]),
    ),
}


def dashboard() -> str:
    """The text of the file. Grafana asks for the Prometheus when it is imported."""
    made = (
        Dashboard("GRPO stack")
        .uid("grpo-stack")
        .tags(["grpo"])
        .refresh("30s")
        .time("now-3h", "now")
        .with_variable(DatasourceVariable("source").label("Prometheus").type("prometheus"))
        .with_variable(
            QueryVariable("run")
            .label("Run")
            .datasource(SOURCE)
            .query(f"label_values(run_api_step, {RUN})")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .include_all(True)
            .all_value(".*")
            .multi(True)
        )
    )
    for title, panels in ROWS.items():
        made = made.with_row(Row(title))
        for panel in panels:
            made = made.with_panel(_time_series(panel))
    return JSONEncoder(sort_keys=True, indent=1).encode(made.build()) + "\n"


def _time_series(panel: Panel) -> TimeSeries:
    made = (
        TimeSeries()
        .title(panel.title)
        .datasource(SOURCE)
        .unit(panel.unit)
        .span(COLUMNS)
        .height(HEIGHT)
        .legend(
            VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )
    if panel.stacked:
        made = made.stacking(StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(30)
    if panel.limit is not None:
        steps = [Threshold(value=None, color="green"), Threshold(value=panel.limit, color="red")]
        made = made.thresholds(ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
        style = GraphThresholdsStyleConfig().mode(GraphTresholdsStyleMode.LINE)
        made = made.thresholds_style(style)
    for number, line in enumerate(panel.lines):
        query = Dataquery().expr(line.query.replace("$", OF_RUN)).legend_format(line.legend)
        made = made.with_target(query.ref_id(chr(ord("A") + number)))
    return made
