"""One soak from the first process to the verdict."""

from __future__ import annotations

import time
from collections.abc import Mapping

import structlog

from tests.soak.cluster import BATCH_SIZE, Cluster, Settings
from tests.soak.drain import drain
from tests.soak.evidence import LINE, read_records
from tests.soak.faults import REDIS, ROUND, plan_faults
from tests.soak.redis_facts import aof_tails_cut
from tests.soak.report import Report, missing_coverage, tally
from tests.soak.trained_line import read_checkpoint
from tests.soak.verdict import LeftOver, judge

WAIT_BOUND_S = 45.0
"""No caller may wait longer, while something is hit every two seconds."""
_SHORT_S, _SHORT_WAIT_BOUND_S = 300.0, 120.0
"""A short soak runs beside other tests, on a machine that may stand still for seconds."""
REPORT = "soak.json"
_QUIET_S = 3.0
"""Without hits before the first, so that every process has begun its work."""
_PROGRESS_EVERY_S = 10.0
_SLOWEST_ROUND_S = 240.0

log = structlog.get_logger()


def wait_bound(planned_s: float) -> float:
    """Seconds."""
    return _SHORT_WAIT_BOUND_S if planned_s < _SHORT_S else WAIT_BOUND_S


def run_soak(settings: Settings) -> Report:
    """Hit the processes for `settings.seconds`, drain the queue, judge. Leaves no process behind;
    what they wrote and the report are in the directory."""
    cluster = Cluster(settings)
    try:
        left_over, seconds = _hit_and_drain(cluster, settings)
        left_behind = cluster.counts() if left_over else {}
    finally:
        cluster.close()
    report = _report(cluster, settings, seconds, left_over, left_behind)
    (settings.directory / REPORT).write_text(report.model_dump_json(indent=2))
    return report


def _hit_and_drain(cluster: Cluster, settings: Settings) -> tuple[LeftOver | None, float]:
    """What was left, None where the run ended early, which the incidents explain; and for how many
    seconds processes were hit, as many as planned at least."""
    supervisor = cluster.supervisor
    if not cluster.start():
        supervisor.incidents.append("Redis and run-api were not ready in time; see their logs")
        return None, settings.seconds
    supervisor.run_until(_Progress(cluster, _QUIET_S), _QUIET_S + 1)
    faults = plan_faults(settings.seed, settings.seconds)
    over, least = _Progress(cluster, settings.seconds), min(ROUND, len(faults))
    began = time.monotonic()
    # On a slow machine the hits fall behind their times: each kind of them has its turn.
    supervisor.run_until(
        lambda: over() and supervisor.hits.total() >= least,
        settings.seconds + _SLOWEST_ROUND_S,
        faults,
    )
    seconds = max(settings.seconds, time.monotonic() - began)
    return (None if supervisor.incidents else drain(cluster, settings.seed)), seconds


class _Progress:
    """True after so many seconds; says now and then how far the trainer is."""

    def __init__(self, cluster: Cluster, seconds: float) -> None:
        self._cluster = cluster
        self._began = time.monotonic()
        self._seconds = seconds
        self._next_s = 0.0

    def __call__(self) -> bool:
        passed_s = time.monotonic() - self._began
        if passed_s >= self._next_s:
            self._next_s += _PROGRESS_EVERY_S
            saved = read_checkpoint(self._cluster.directory / LINE)
            log.info("soaking", seconds=int(passed_s), batches=saved.batch_id)
        return passed_s > self._seconds


def _report(
    cluster: Cluster,
    settings: Settings,
    seconds: float,
    left_over: LeftOver | None,
    left_behind: Mapping[str, float],
) -> Report:
    records, aof = read_records(settings.directory), cluster.aof_states
    evidence = records.evidence(
        BATCH_SIZE,
        left_over=left_over,
        incidents=cluster.supervisor.incidents,
        left_behind=left_behind,
    )
    redis_log = cluster.supervisor.log(REDIS)
    report = Report(
        seed=settings.seed,
        appendfsync=settings.appendfsync,
        seconds=seconds,
        problems=judge(evidence, wait_bound(settings.seconds)),
        left_over=left_over,
        notes=records.notes(),
        hits=cluster.supervisor.hits,
        redis_killed_with_fsync_pending=sum(state.aof_pending_bio_fsync > 0 for state in aof),
        redis_killed_while_rewriting=sum(state.aof_rewrite_in_progress for state in aof),
        aof_tails_cut=aof_tails_cut(redis_log),
        aof_delayed_fsyncs=sum(state.aof_delayed_fsync for state in aof),
        longest_waits_s=evidence.longest_waits_s,
        **tally(evidence, records),
    )
    if left_over:
        report.problems += missing_coverage(report, settings.seconds)
    return report
