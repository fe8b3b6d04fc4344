"""The end of a soak: nothing is hit any more, and the queue is emptied to the last group."""

from __future__ import annotations

import time

from tests.soak.cluster import APIS, BATCH_SIZE, QUIET_DEADLINE_S, START_DEADLINE_S, Cluster
from tests.soak.evidence import FILLER, LINE, journal_path, read_records
from tests.soak.faults import ENVIRONMENTS, REDIS, TRAINER
from tests.soak.groups import GroupMaker, digest
from tests.soak.journal import Journal, Outcome
from tests.soak.trained_line import read_checkpoint
from tests.soak.verdict import LeftOver

GOODBYE_DEADLINE_S = 400.0
IDLE_DEADLINE_S = 400.0
_STILL_S = 5.0
"""Longer than the trainer waits in one poll and until it saves what it has."""
_POLL_S = 0.1
_FILLER_SENDER = 99


def drain(cluster: Cluster, seed: int) -> LeftOver | None:
    """End the environments, let the trainer take what is there, fill up the last batch, end it.

    Returns:
        What was left in the queue before it was filled up; None where the run did not come that
        far. Whatever is wrong is among the supervisor's incidents.
    """
    supervisor = cluster.supervisor
    _wait_until_up(cluster)
    supervisor.end(ENVIRONMENTS, GOODBYE_DEADLINE_S)
    if not _wait_until_idle(cluster):
        return None
    left_over = _look_at_queue(cluster)
    if left_over is None:
        return None
    _fill_up(cluster, seed)
    _wait_until_idle(cluster)
    supervisor.end([TRAINER], GOODBYE_DEADLINE_S)
    return left_over


def _wait_until_up(cluster: Cluster) -> None:
    """What was hit last is started again, and takes signals."""
    names = [REDIS, *APIS, *ENVIRONMENTS, TRAINER]
    supervisor = cluster.supervisor

    def waiting() -> list[str]:
        return [
            name for name in names if supervisor.is_down(name) or not cluster.takes_signals(name)
        ]

    if not supervisor.run_until(lambda: not waiting(), START_DEADLINE_S):
        supervisor.incidents.append(
            f"not up again after {START_DEADLINE_S:g} s: {', '.join(waiting())}"
        )


def _wait_until_idle(cluster: Cluster) -> bool:
    """True once the trainer has saved every batch handed out, and gets no other."""
    seen: object = None
    since = time.monotonic()

    def is_idle() -> bool:
        nonlocal seen, since
        time.sleep(_POLL_S)
        status, saved = cluster.status(), read_checkpoint(cluster.directory / LINE).batch_id
        now = (status, saved)
        if status is None or status.current_step != saved or now != seen:
            seen, since = now, time.monotonic()
        return time.monotonic() - since > _STILL_S

    supervisor = cluster.supervisor
    if not supervisor.run_until(is_idle, IDLE_DEADLINE_S):
        supervisor.incidents.append(
            f"the trainer was not done after {IDLE_DEADLINE_S:g} s: status and last batch {seen}"
        )
    return not supervisor.incidents


def _look_at_queue(cluster: Cluster) -> LeftOver | None:
    """Of records and a queue that belong together: a trainer that stood still may take a batch."""
    give_up_at = time.monotonic() + QUIET_DEADLINE_S
    before = cluster.status()
    while True:
        evidence, status = read_records(cluster.directory).evidence(BATCH_SIZE), cluster.status()
        saved = read_checkpoint(cluster.directory / LINE).batch_id
        if status is not None and status == before and status.current_step == saved:
            return evidence.look_at_queue(status.queue_size)
        if time.monotonic() > give_up_at:
            cluster.supervisor.incidents.append(f"the queue does not come to rest: {status}")
            return None
        before = status
        time.sleep(_POLL_S)


def _fill_up(cluster: Cluster, seed: int) -> None:
    """Single sequences from nobody, until the queue is empty."""
    with Journal(journal_path(cluster.directory, FILLER)) as journal:
        maker = GroupMaker(_FILLER_SENDER, journal.life, seed)
        for _ in range(-int(cluster.counts()["queued_sequences"]) % BATCH_SIZE):
            _send_filler(cluster, journal, maker)
    if not _empties(cluster):
        cluster.supervisor.incidents.append("whole batches stay in the queue")


def _send_filler(cluster: Cluster, journal: Journal, maker: GroupMaker) -> None:
    group = maker.make(1, env_id=None)
    call = journal.sent([digest(group)], [group.size])
    cluster.post("/scored_data", group.model_dump_json().encode())
    journal.settled(call, Outcome.ACKNOWLEDGED)


def _empties(cluster: Cluster) -> bool:
    """Once the trainer has taken what there is."""
    give_up_at = time.monotonic() + QUIET_DEADLINE_S
    while time.monotonic() < give_up_at:
        status = cluster.status()
        if status is not None and status.queue_size == 0:
            return True
        time.sleep(_POLL_S)
    return False
