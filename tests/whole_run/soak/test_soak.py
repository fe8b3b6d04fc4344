"""Every process is killed repeatedly, and each acknowledged group is trained exactly once.

Options are environment variables: `SOAK_SECONDS`, `SOAK_SEED`, `SOAK_APPENDFSYNC`, and
`SOAK_DIRECTORY` for the journals and logs. `make soak` sets them.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_core.clients.run_api import EnvironmentClient
from tests.whole_run.soak.cluster import BATCH_SIZE, Cluster, Settings
from tests.whole_run.soak.hits import BATCHES_BETWEEN, ENVIRONMENTS, MAX_DOWN_S, TRAINER, plan_round
from tests.whole_run.soak.journal import FILLER, Delivered, Journal, Outcome, Records, journal_path
from tests.whole_run.soak.sending import GroupMaker, digest
from tests.whole_run.soak.verdict import Evidence, LeftOver, Report, count, missing, problems

REPORT = "soak.json"
_FILLER_SENDER = 99
SECONDS = float(os.environ.get("SOAK_SECONDS", "15"))
_AROUND_IT_S = 3600.0
"""Time for start, last round, drain and verdict, each of which has a shorter deadline."""


@pytest.mark.timeout(SECONDS + _AROUND_IT_S)
def test_every_acknowledged_group_is_trained_exactly_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(
        directory=Path(os.environ.get("SOAK_DIRECTORY") or tmp_path),
        seconds=SECONDS,
        seed=int(os.environ.get("SOAK_SEED", "0")),
        appendfsync=os.environ.get("SOAK_APPENDFSYNC", "always"),
    )
    report = run_soak(settings)
    with capsys.disabled():
        sys.stdout.write(f"\n{report}\n")  # even if the soak failed
    assert not report.problems


def run_soak(settings: Settings) -> Report:
    """Hit the processes, drain the queue and check the result. All processes end. The report and
    the journals are in the directory."""
    records = Records(settings.directory)
    left_over, left_behind, incidents = None, {}, []
    began = hit_until = time.monotonic()
    with Cluster(settings, records) as cluster:
        try:
            cluster.start()
            began = time.monotonic()
            _hit(cluster, settings, records)
            hit_until = time.monotonic()
            left_over = _drain(cluster, settings, records)
            left_behind = cluster.counts()
        except AssertionError as error:
            incidents.append(str(error))
    evidence = replace(_evidence(records), left_over=left_over, left_behind=left_behind)
    counts = count(evidence, records)
    report = Report(
        seed=settings.seed,
        appendfsync=settings.appendfsync,
        seconds=hit_until - began,
        problems=[*incidents, *problems(evidence, counts, cluster.hits)],
        counts=counts,
        hits=cluster.hits,
    )
    (settings.directory / REPORT).write_text(report.model_dump_json(indent=2))
    return report


def _hit(cluster: Cluster, settings: Settings, records: Records) -> None:
    """Run whole rounds for at least the planned time, then until no required event is missing."""
    dice = random.Random(settings.seed)
    began = time.monotonic()
    while not cluster.hits or time.monotonic() - began < settings.seconds:
        for hit in plan_round(dice):
            _await_batches(cluster, records, dice.choice(BATCHES_BETWEEN))
            cluster.hit(hit, down_s=dice.uniform(0.0, MAX_DOWN_S))
    cluster.wait_until(cluster.all_up)
    cluster.wait_until(lambda: not missing(count(_evidence(records), records), cluster.hits))


def _await_batches(cluster: Cluster, records: Records, batches: int) -> None:
    """Wait until the trainer has received this many more batches."""
    enough = records.batches_received() + batches
    cluster.wait_until(lambda: records.batches_received() >= enough)


def _drain(cluster: Cluster, settings: Settings, records: Records) -> LeftOver:
    """Stop the environments, read the queue, fill its last batch, stop the trainer."""
    cluster.wait_until(cluster.all_up)
    cluster.end(ENVIRONMENTS)
    left_over = cluster.wait_until(lambda: _look_at_queue(cluster, records))
    assert left_over is not None
    asyncio.run(_fill_up(cluster, settings))
    cluster.wait_until(lambda: _is_empty(cluster, records))
    cluster.end([TRAINER])
    return left_over


def _look_at_queue(cluster: Cluster, records: Records) -> LeftOver | None:
    """The state of the queue; None unless checkpoints include every batch, before and after."""
    before = cluster.status()
    evidence = _evidence(records)
    if before.current_step == len(evidence.line) and cluster.status() == before:
        return evidence.look_at_queue(before.queue_size)
    return None


async def _fill_up(cluster: Cluster, settings: Settings) -> None:
    """Send groups of one sequence without env_id until the queue holds only whole batches."""
    with Journal(journal_path(settings.directory, FILLER)) as journal:
        maker = GroupMaker(_FILLER_SENDER, journal.life, settings.seed)
        async with EnvironmentClient(cluster.url, settings.call_deadline_s) as client:
            for _ in range(-int(cluster.counts()["queued_sequences"]) % BATCH_SIZE):
                group = maker.make(1, env_id=None)
                call = journal.sent({digest(group): group.size})
                await client.submit(group, run_uuid="")
                journal.settled(call, Outcome.ACKNOWLEDGED)


def _is_empty(cluster: Cluster, records: Records) -> bool:
    """Whether the queue is empty and checkpoints include every batch."""
    records.read_on()
    status = cluster.status()
    return status.queue_size == 0 and status.current_step == len(records.line())


def _evidence(records: Records) -> Evidence:
    """All that the journals hold by now."""
    records.read_on()
    return Evidence(
        batch_size=BATCH_SIZE,
        submissions=records.submissions(),
        line=records.line(),
        deliveries=list(records.of_kind(Delivered)),
    )
