"""Names the Redis keys of a run and defines the text format of metadata in them.

    trainer            hash   registration (JSON), batch_size, id, step, run_uuid, started;
                              last_batch, acknowledged (batch ids: all up to it), redeliveries;
                              takes_leases: set once the trainer has leased a batch
    environments       hash   env_id → registration (JSON)
    environment_names  hash   env_id → name
    group_sizes        hash   env_id → registered group size
    name_counts        hash   desired name → environments that asked for it
    connected          set    env_ids of all environments
    seen               hash   env_id → Redis' time of its last poll (ms)
    buffers            hash   env_id → buffered parts, oldest first: groups, as below
    queue              zset   entries, all with score 0: sorted by kind, then by age
    payloads           hash   group id → payload: of buffered, queued and leased groups
    large              hash   group id → key of a staged payload; replaces the entry in payloads
    staged:<id>        string a payload, written piece by piece; expires unless queued
    queued_kinds       hash   "env_id sequences" → entries in the queue
    queued_sizes       hash   sequences of a group → groups in the queue
    totals             hash   queued_groups, queued_sequences, queued_bytes, buffered_parts,
                              buffered_bytes, leased_bytes; environments: that ever registered
    leases             hash   batch id → lease: batches handed out and not acknowledged
    answers            hash   batch id → claim of the plain poll whose answer sends the batch: a
                              channel with a listener while it is sent; " delivered" is appended
                              when all of it was sent
    item_positions     hash   name of the environment's choice → ranges of the items that are used
                              with groups that were accepted: "0-41,43-45"
    latest             hash   id of the last queued group; acknowledged: set if its batch is
    refusals           hash   groups: refused since the last trainer registered; last: reason for
                              the last refusal
    start              hash   process: id of the Redis process; last_group_id: at its start. It
                              survives a reset
    losses             hash   ids of a run-api process and a Redis process → groups that the former
                              confirmed and the latter lacked at its start
    last_group_id      string
    last_env_id        string number of env_ids that were given out
    resets             string number of resets; this, last_group_id and last_env_id survive a
                              reset, so that nothing of a run is taken for the next run's
    receipt:<id>       string the answer to a call that must not be carried out twice; it expires.
                              Of a refusal: the id of the trainer for which it was counted

    group           "id:sequences:stored_bytes@epoch.step": the version that was served when the
                    group was received; "@epoch.step" is absent if it was unknown
    groups          these, joined by ","
    entry           "env_id sequences id groups queued_ms", of one whole group or of the parts of
                    one; id of the last of its groups, in 16 digits; queued_ms by Redis' clock
    lease           "step sequences leased_ms oldest_ms groups"

The env_id of an unregistered sender is "-". Planning reads only the oldest entries of each kind,
which are ranges in the sort order of the queue.

The inference server writes the served weights (`grpo_core.redis.keys`); run-api only reads them.
"""

from __future__ import annotations

import hashlib
import os

from grpo_api.planning.batch_plan import Kind
from grpo_api.planning.placement import Groups, StoredGroup
from grpo_core.wire.policy_version import PolicyVersion

NO_ENVIRONMENT = "-"
RECEIPT_S = 600
"""Longer than any request retries Redis, and longer than clients repeat a request."""

RUN_KEYS = (
    *("trainer", "environments", "environment_names", "group_sizes", "name_counts", "connected"),
    *("seen", "buffers", "queue", "payloads", "large", "queued_kinds", "queued_sizes", "totals"),
    *("leases", "answers", "item_positions"),
    *("latest", "refusals", "resets", "last_group_id", "last_env_id", "start", "losses"),
)
"""The first KEYS of every script, each of which has a local of this name for it."""


def receipt_key(key: str | None = None) -> str:
    """Where the answer to one call is stored: under the caller's key, or a random one."""
    if key is None:
        return f"receipt:{os.urandom(16).hex()}"
    return f"receipt:key:{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}"


def env_field(env_id: int | None) -> str:
    return NO_ENVIRONMENT if env_id is None else str(env_id)


def parse_kind(written: bytes) -> Kind:
    """The kind at the start of an entry of the queue, or in a field of `queued_kinds`."""
    env_id, sequences = written.decode().split(" ", 2)[:2]
    return Kind(None if env_id == NO_ENVIRONMENT else int(env_id), int(sequences))


def entry_age(entry: bytes) -> bytes:
    """The part of an entry that sorts entries by age."""
    return entry.split(b" ", 3)[2]


def write_entry(kind: Kind, groups: Groups) -> str:
    """An entry, to which the script that queues it appends the time."""
    entry_id = f"{groups[-1].id:016d}"
    return f"{env_field(kind.env_id)} {kind.sequences} {entry_id} {write_groups(groups)}"


def write_version(version: PolicyVersion | None) -> str:
    return "" if version is None else f"@{version}"


def write_groups(groups: Groups) -> str:
    return ",".join(
        f"{group.id}:{group.sequences}:{group.stored_bytes}{write_version(group.received_under)}"
        for group in groups
    )


def parse_groups(written: str) -> Groups:
    return tuple(_parse_group(group) for group in written.split(",") if group)


def _parse_group(written: str) -> StoredGroup:
    numbers, _, version = written.partition("@")
    group_id, sequences, stored_bytes = map(int, numbers.split(":"))
    under = PolicyVersion.parse(version) if version else None
    return StoredGroup(group_id, sequences, stored_bytes, under)
