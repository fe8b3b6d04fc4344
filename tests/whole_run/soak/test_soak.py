"""Every process is killed repeatedly, and each acknowledged group is trained exactly once.

Options are environment variables: `SOAK_SECONDS`, `SOAK_SEED`, `SOAK_APPENDFSYNC`, and
`SOAK_DIRECTORY` for the journals and logs. `make soak` sets them.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from grpo_core.clients.run_api import EnvironmentClient
from grpo_core.process import ProcessFailed
from tests.whole_run.commands import REDIS, TRAINER
from tests.whole_run.journal import Entry, Journal, Outcome
from tests.whole_run.soak.cluster import APIS, BATCH_SIZE, ENVIRONMENTS, SoakCommands, SoakRig
from tests.whole_run.soak.groups import OTHER_BODY_REFUSED, REPEATED, GroupMaker, digest
from tests.whole_run.stages import SAVED, TRAINING
from tests.whole_run.verdict import Evidence, judge

REPORT = "soak.json"
FILLER, _FILLER_SENDER = "filler", 99
"""Sends the groups that fill the last batch."""
SECONDS = float(os.environ.get("SOAK_SECONDS", "15"))
_AROUND_IT_S = 3600.0
"""Time for start, last round, drain and verdict, each of which has a shorter deadline."""
BATCHES_BETWEEN = (0, 0, 1, 5, 20)
"""Batches trained between two hits. With 0 the next hit comes during the recovery."""
MAX_DOWN_S = 1.0


@dataclass(frozen=True)
class Hit:
    """It ends all `victims` at once, or one of them if `one_of_them`, with SIGKILL or SIGTERM.

    stage: of the trainer, at which they are killed; rewrites: Redis then rewrites its file
    """

    kind: str
    victims: tuple[str, ...]
    stage: str = ""
    one_of_them: bool = False
    rewrites: bool = False


HITS = (
    Hit("SIGKILL run-api", APIS, one_of_them=True),
    Hit("SIGKILL both run-api", APIS),
    Hit("SIGTERM run-api", APIS, one_of_them=True),
    Hit("SIGKILL Redis", (REDIS,)),
    Hit("SIGKILL Redis, rewriting its file", (REDIS,), rewrites=True),
    Hit("SIGTERM Redis", (REDIS,)),
    Hit("SIGKILL Redis and run-api", (REDIS, APIS[0])),
    Hit("SIGKILL trainer, batch not saved", (TRAINER,), TRAINING),
    Hit("SIGKILL trainer, batch not acknowledged", (TRAINER,), SAVED),
    Hit("SIGTERM trainer", (TRAINER,)),
    Hit("SIGKILL environment", ENVIRONMENTS, one_of_them=True),
)
"""One round consists of each of these hits once, in random order."""


@pytest.mark.timeout(SECONDS + _AROUND_IT_S)
def test_every_acknowledged_group_is_trained_exactly_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = SoakCommands(
        directory=Path(os.environ.get("SOAK_DIRECTORY") or tmp_path),
        seconds=SECONDS,
        seed=int(os.environ.get("SOAK_SEED", "0")),
        appendfsync=os.environ.get("SOAK_APPENDFSYNC", "always"),
    )
    hits: Counter[str] = Counter()
    with SoakRig(commands) as rig:
        rig.start(REDIS, *APIS, TRAINER, *ENVIRONMENTS)
        began = time.monotonic()
        try:
            _hit(rig, commands, hits)
            problems = _drain(rig, commands)
        except (AssertionError, ProcessFailed) as error:
            problems = [str(error), *judge(rig.evidence())]
        counts = count(rig.evidence(), rig.journals.entries())
    problems += [f"never happened: {name}" for name in missing(counts, hits)]
    seconds = round(time.monotonic() - began)
    report = {"seed": commands.seed, "appendfsync": commands.appendfsync, "seconds": seconds}
    report |= {"hits": hits, "counts": counts, "problems": problems}
    (commands.directory / REPORT).write_text(json.dumps(report, indent=2))
    with capsys.disabled():
        sys.stdout.write(f"\n{json.dumps(report, indent=2)}\n")  # even if the soak failed
    assert not problems


def _hit(rig: SoakRig, commands: SoakCommands, hits: Counter[str]) -> None:
    """Run whole rounds for at least the planned time, then until no required event is missing."""
    dice, began = random.Random(commands.seed), time.monotonic()
    while not hits or time.monotonic() - began < commands.seconds:
        for hit in dice.sample(HITS, len(HITS)):
            enough = len(rig.taken()) + dice.choice(BATCHES_BETWEEN)
            rig.wait_for(lambda enough=enough: len(rig.taken()) >= enough)
            victims = (dice.choice(hit.victims),) if hit.one_of_them else hit.victims
            _end(rig, hit, victims)
            time.sleep(dice.uniform(0.0, MAX_DOWN_S))
            for name in victims:
                rig.launch(name)
            hits[hit.kind] += 1
    rig.wait_for(lambda: not missing(count(rig.evidence(), rig.journals.entries()), hits))


def _end(rig: SoakRig, hit: Hit, victims: tuple[str, ...]) -> None:
    """Once they are ready: only then they exit cleanly on SIGTERM."""
    for name in victims:
        rig.wait_until_ready(name)
    with rig.held_at(hit.stage) if hit.stage else nullcontext():
        if hit.rewrites:
            with redis.Redis(port=rig.port(REDIS)) as client, suppress(redis.ResponseError):
                client.bgrewriteaof()  # Redis rejects this during a rewrite
        (rig.end if hit.kind.startswith("SIGTERM") else rig.kill)(*victims)


def _drain(rig: SoakRig, commands: SoakCommands) -> list[str]:
    """Stop the environments, look at the queue, fill its last batch, train it, stop the trainer.
    Returns what is wrong."""
    for name in (*APIS, TRAINER, *ENVIRONMENTS):
        rig.wait_until_ready(name)
    rig.end(*ENVIRONMENTS)
    if found := judge(rig.wait_for(lambda: _at_rest(rig))):
        return found
    asyncio.run(_fill_up(rig, commands))
    rig.wait_for(lambda: (rest := _at_rest(rig)) and rest.queued == 0)
    rig.end(TRAINER)
    left = [f"{what} is {n:g} at the end" for what, n in rig.counts().items() if n]
    return [*judge(rig.evidence(queued=0)), *left]


def _at_rest(rig: SoakRig) -> Evidence | None:
    """With the queue; None unless every batch is acknowledged, before and after."""
    before = rig.status()
    evidence = rig.evidence(before["queue_size"])
    is_still = before["current_step"] == max(evidence.line(), default=0) and rig.status() == before
    return evidence if is_still else None


async def _fill_up(rig: SoakRig, commands: SoakCommands) -> None:
    """Send groups of one sequence without env_id until the queue holds only whole batches."""
    journal = Journal(rig.directory / "journal", FILLER)
    maker = GroupMaker(_FILLER_SENDER, journal.life, commands.seed)
    async with EnvironmentClient(rig.run_api_url, commands.call_deadline_s) as client:
        for _ in range(-int(rig.counts()["queued_sequences"]) % BATCH_SIZE):
            group = maker.make(1, env_id=None)
            call = journal.sent({digest(group): group.size})
            await client.submit(group, run_uuid="")
            journal.settled(call, Outcome.ACKNOWLEDGED)


_REDELIVERED, _UNANSWERED = "batches delivered again", "groups unanswered"
_UNANSWERED_TRAINED = "groups unanswered and trained"


def count(evidence: Evidence, entries: list[Entry]) -> dict[str, int]:
    trained, unanswered = evidence.trained(), evidence.digests(Outcome.UNANSWERED)
    return {
        "groups submitted": len(evidence.submissions),
        "groups acknowledged": len(evidence.digests(Outcome.ACKNOWLEDGED)),
        _UNANSWERED: len(unanswered),
        _UNANSWERED_TRAINED: len(unanswered & set(trained)),
        "groups refused on purpose": len(evidence.digests(Outcome.REFUSED)),
        "groups trained": len(trained),
        "batches trained": len(evidence.line()),
        _REDELIVERED: len(evidence.taken) - len({entry["batch"] for entry in evidence.taken}),
        **Counter(entry["noted"] for entry in entries if "noted" in entry),
    }


def missing(counts: Mapping[str, int], hits: Mapping[str, int]) -> list[str]:
    """Events that have not happened yet and that a soak must include."""
    wanted = (_REDELIVERED, _UNANSWERED, _UNANSWERED_TRAINED, REPEATED, OTHER_BODY_REFUSED)
    happened = {**counts, **hits}
    return [name for name in (*wanted, *(hit.kind for hit in HITS)) if not happened.get(name)]
