"""What of a run needs a person: one table for the live page, notifications and Prometheus' rules.

`AlertWatch` looks at measures over time. Prometheus evaluates the same rows itself, as rules that
are generated from this table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Severity(StrEnum):
    CRITICAL = "critical"
    """The run stands still, or soon will."""
    WARNING = "warning"
    """The run goes on, but slower or with worse data."""


@dataclass(frozen=True)
class Measures:
    """One look at a run. None: unknown, or it has no meaning now, for example environments after
    the last step. A total counts since any start, and may begin at 0 again."""

    over_step_s: float | None = None
    """Seconds since the last optimizer step, or since the trainer began its first, less the longest
    step so far, or `FIRST_STEP_S`."""
    dropped_share: float | None = None
    """Of the newest groups, the share that was dropped because all scores are equal."""
    staleness_mean: float | None = None
    """`staleness/mean` of the newest step, in steps."""
    oldest_queued_group_s: float | None = None
    """Age of the oldest group in the queue; 0 if the queue is empty."""
    oldest_lease_s: float | None = None
    """Age of the oldest batch that is not acknowledged; 0 without one."""
    refused_groups: float | None = None
    """Total of groups that run-api refused."""
    unusable_groups: float | None = None
    """Total of `data/unusable_groups`."""
    stale_groups: float | None = None
    """Total of `data/stale_groups`."""
    quarantined_batches: float | None = None
    """Total of `data/quarantined_batches`."""
    failed_checks: float | None = None
    """Total of `checks/failed`."""
    environments_alive: float | None = None
    """Environments that polled run-api lately and have not left."""
    servers_gone: float | None = None
    """How many inference servers fewer run than within the last hour, if one was lost since: it
    failed, or is gone without a stop signal."""
    engine_crashes: float | None = None
    """Total of `crashes` of all servers, counted for each of them."""
    run_api_answers: bool | None = None
    redis_answers: bool | None = None
    redis_disk_share: float | None = None
    """Size of Redis' append-only file, divided by the disk space that it may take."""
    disk_free_bytes: float | None = None
    """Free where the trainer writes its checkpoints."""
    details: Mapping[str, str] = field(default_factory=dict)
    """By measure: what is the case, in words."""


@dataclass(frozen=True)
class Alert:
    """One row. It fires once its measure has been above (or below) the threshold for `hold_s`.

    Args:
        measure: name of a field of `Measures`
        promql: the measure in PromQL, one value for each run. It has no value where the measure
            would be None.
        above: whether the measure fires above the threshold; else below
        over_s: the measure is a total, and its increase over so many seconds counts
        unit: of the threshold: "s", "steps", "bytes", or "" for a number
    """

    name: str
    meaning: str
    advice: str
    measure: str
    promql: str
    threshold: float
    severity: Severity = Severity.WARNING
    above: bool = True
    hold_s: float = 0.0
    over_s: float = 0.0
    unit: str = ""

    @property
    def expression(self) -> str:
        """The condition in PromQL, without `hold_s`."""
        return f"({self.promql}) {'>' if self.above else '<'} {self.threshold:g}"

    def is_beyond(self, value: float) -> bool:
        return value > self.threshold if self.above else value < self.threshold


RUN = "run"
"""The label that every scrape configuration of this project gives to a run's metrics."""
TEN_MINUTES_S = 600.0
FIRST_STEP_S = 2700.0
"""A step's usual duration in a run that has not finished one: nothing shows yet how slow it is."""
_STEP_ENDED = "grpo_trainer_last_step_timestamp_seconds"
_LOST = "run_api_servers_lost"
_STEP_TOOK = "grpo_trainer_train_step_time"
MOST_DROPPED = 0.9
"""Of the groups: above it, batches take ten times as long."""
DROPPED_ADVICE = (
    "equal scores teach nothing: try the reward with `env-server check`, and read the dropped "
    "rollouts (`grpo-rollouts RUN/untrained/TASK/dropped`). If the scores are right, the prompts "
    "are too easy or too hard for the model"
)
REDIS_DISK_SHARE = 0.75
"""Above this share, the file that replaces the append-only file may not fit beside it."""


def _largest(metric: str) -> str:
    return f"max by ({RUN}) ({metric})"


def _earlier(metric: str) -> str:
    """Of the last day, also if its source is gone now."""
    return _largest(f"last_over_time({metric}[1d])")


def _known(metric: str) -> str:
    """The value of now before all earlier ones: a new run may have the name of an older one."""
    return f"({_largest(metric)} or {_earlier(metric)})"


def _until_the_end(promql: str, value: Callable[[str], str] = _largest) -> str:
    """No value before a trainer has registered, and once run-api has handed out the last batch. A
    run without a last batch has 0 steps.

    Args: value: `_known` if the rule also counts while run-api is gone
    """
    step, steps = value("run_api_step"), value("run_api_num_steps")
    return f"{promql} and on ({RUN}) ({step} < {steps} or {step} > 0 and on ({RUN}) {steps} == 0)"


def _grown(
    name: str, meaning: str, advice: str, measure: str, metric: str, threshold: float = 0
) -> Alert:
    """A warning about a total that grew by more than the threshold in the last ten minutes."""
    promql = _largest(f"increase({metric}[{TEN_MINUTES_S / 60:g}m])")
    return Alert(name, meaning, advice, measure, promql, threshold, over_s=TEN_MINUTES_S)


ALERTS: tuple[Alert, ...] = (
    Alert(
        "no-training-step",
        "The trainer has finished no step for 15 minutes more than its longest step took, or "
        "within an hour since its first step began.",
        "look at the newest lines of the logs of trainer and environments: a trainer that waits "
        "for a batch gets no groups, so see why environments send none",
        "over_step_s",
        # Also of a trainer that has ended, but not of one that has not begun its first step.
        _until_the_end(
            f"time() - ({_largest(_STEP_ENDED)} or {_earlier(_STEP_ENDED)} "
            f"unless on ({RUN}) grpo_trainer_steps_taken_total) - "
            f"(max by ({RUN}) (max_over_time({_STEP_TOOK}[1d])) "
            f"or 0 * {_earlier(_STEP_ENDED)} + {FIRST_STEP_S:g})",
            _known,
        ),
        900,
        severity=Severity.CRITICAL,
        unit="s",
    ),
    Alert(
        "run-api-gone",
        "run-api does not answer, so trainer and environments wait.",
        "look at the end of run-api's log, and start run-api again: its state is in Redis",
        "run_api_answers",
        _until_the_end(
            f"(count by ({RUN}) (run_api_redis_up) or 0 * {_earlier('run_api_redis_up')})",
            _known,
        ),
        1,
        severity=Severity.CRITICAL,
        above=False,
        hold_s=60,
    ),
    Alert(
        "queue-stuck",
        "A group has been in the queue for 30 minutes.",
        "check that a trainer runs and takes batches; if it does, run-api cannot form a batch: "
        "compare --batch-size with the group sizes and weights of the environments",
        "oldest_queued_group_s",
        _until_the_end(_largest("run_api_oldest_queued_group_age_seconds")),
        1800,
        unit="s",
    ),
    Alert(
        "no-checkpoint",
        "A batch has not been acknowledged for two hours, so a killed trainer repeats its steps.",
        "check that the trainer runs and can write to --save-path, or save more often with "
        "--checkpoint-interval",
        "oldest_lease_s",
        _largest("run_api_oldest_lease_age_seconds"),
        7200,
        unit="s",
    ),
    Alert(
        "groups-dropped",
        "Nine of ten groups are dropped because all their scores are equal.",
        DROPPED_ADVICE,
        "dropped_share",
        _until_the_end(_largest("grpo_environment_dropped_share")),
        MOST_DROPPED,
    ),
    Alert(
        "staleness-high",
        "The policy is trained on rollouts that are more than 4 steps old on average.",
        "lower --max-batches-offpolicy or --max-concurrent-groups of the environments",
        "staleness_mean",
        _largest("grpo_trainer_staleness_mean"),
        4,
        hold_s=300,
        unit="steps",
    ),
    Alert(
        "no-environment",
        "No environment is connected, so no new groups arrive.",
        "look at the end of the environment's log, and start an environment again",
        "environments_alive",
        _until_the_end(_largest("run_api_environments_alive")),
        1,
        severity=Severity.CRITICAL,
        above=False,
        hold_s=120,
    ),
    Alert(
        "server-gone",
        "An inference server was lost within the last hour, and fewer run than before.",
        "look at the end of its log and start the server again; the run goes on with the others",
        "servers_gone",
        _until_the_end(
            f"{_largest('max_over_time(run_api_servers[1h])')} - {_largest('run_api_servers')} "
            # not one that ended because of a stop signal
            f"and on ({RUN}) {_largest(_LOST)} > min by ({RUN}) (min_over_time({_LOST}[1h]))"
        ),
        0,
        severity=Severity.CRITICAL,
        hold_s=60,
    ),
    _grown(
        "engine-crashed",
        "An inference engine crashed in the last ten minutes and was started again.",
        "find the cause in the server's log: often too little memory",
        "engine_crashes",
        "run_api_server_crashes_total",
    ),
    _grown(
        "groups-refused",
        "run-api refused groups in the last ten minutes.",
        "correct the environment that sent them: `last_refusal` in run-api's /status has the "
        "reason",
        "refused_groups",
        "run_api_refused_groups_total",
    ),
    _grown(
        "groups-unusable",
        "The trainer dropped groups that it cannot train on in the last ten minutes.",
        "see the events group.dropped in the trainer's log, and correct the environment",
        "unusable_groups",
        "grpo_trainer_data_unusable_groups_total",
    ),
    _grown(
        "groups-stale",
        "The trainer dropped more than 10 groups beyond --max-staleness in the last ten minutes.",
        "lower --max-batches-offpolicy of the environments, or raise --max-staleness",
        "stale_groups",
        "grpo_trainer_data_stale_groups_total",
        10,
    ),
    _grown(
        "batch-quarantined",
        "A batch whose loss or gradient is not finite was put aside in the last ten minutes.",
        "look at the batch in the directory quarantine below --save-path; if there are more, "
        "lower --lr",
        "quarantined_batches",
        "grpo_trainer_data_quarantined_batches_total",
    ),
    _grown(
        "check-failed",
        "A check of the rollouts or of the weights failed in the last ten minutes.",
        "see the events check.failed in the trainer's log; each has a hint",
        "failed_checks",
        "grpo_trainer_checks_failed_total",
    ),
    Alert(
        "redis-gone",
        "Redis does not answer run-api.",
        "look at Redis' log, and start Redis again on the same directory: nothing acknowledged "
        "is lost",
        "redis_answers",
        f"min by ({RUN}) (run_api_redis_up)",
        1,
        severity=Severity.CRITICAL,
        above=False,
        hold_s=30,
    ),
    Alert(
        "redis-disk",
        "Redis' append-only file takes more than 75 % of its disk space.",
        "enlarge the disk, or lower --max-queued-bytes and --max-leased-bytes of run-api: Redis "
        "ends when its disk is full, and loses nothing that it has acknowledged",
        "redis_disk_share",
        _largest("run_api_redis_append_only_file_bytes / run_api_redis_disk_bytes"),
        REDIS_DISK_SHARE,
    ),
    Alert(
        "disk-low",
        "Less than 2 GB are free where the trainer writes its checkpoints.",
        "free disk space, or keep fewer checkpoints with --keep-checkpoints",
        "disk_free_bytes",
        f"min by ({RUN}) (grpo_trainer_disk_free_bytes)",
        2e9,
        above=False,
        hold_s=60,
        unit="bytes",
    ),
)


@dataclass(frozen=True)
class FiringAlert:
    """`since`: when its condition began, by the clock of `AlertWatch.look`. `value`: of the
    measure, or its increase."""

    alert: Alert
    since: float
    value: float
    detail: str = ""

    @property
    def text(self) -> str:
        """What is the case: with its numbers, if they are known."""
        return self.detail or self.alert.meaning


class _Increase:
    """The increase of a total over the last `over_s` seconds. A total that falls began again at
    0."""

    def __init__(self, over_s: float) -> None:
        self._over_s = over_s
        self._last: float | None = None
        self._steps: deque[tuple[float, float]] = deque()

    def add(self, total: float | None, now: float) -> float:
        if total is not None:
            if self._last is not None and total != self._last:
                grown = total - self._last if total > self._last else total
                self._steps.append((now, grown))
            self._last = total
        while self._steps and self._steps[0][0] <= now - self._over_s:
            self._steps.popleft()
        return sum(grown for _, grown in self._steps)


class AlertWatch:
    """Gives the alerts that fire, from measures over time."""

    def __init__(self, alerts: Sequence[Alert] = ALERTS) -> None:
        self._alerts = alerts
        self._began: dict[str, float] = {}
        self._increases = {alert.name: _Increase(alert.over_s) for alert in alerts if alert.over_s}

    def look(self, measures: Measures, now: float) -> tuple[FiringAlert, ...]:
        """The alerts that fire now, in the order of the table.

        Args:
            now: seconds of any clock that does not go back
        """
        found = (self._look(alert, measures, now) for alert in self._alerts)
        return tuple(firing for firing in found if firing is not None)

    def _look(self, alert: Alert, measures: Measures, now: float) -> FiringAlert | None:
        value: float | None = getattr(measures, alert.measure)
        if alert.over_s:
            value = self._increases[alert.name].add(value, now)
        if value is None or not alert.is_beyond(value):
            self._began.pop(alert.name, None)
            return None
        since = self._began.setdefault(alert.name, now)
        if now - since < alert.hold_s:
            return None
        return FiringAlert(alert, since, value, measures.details.get(alert.measure, ""))
