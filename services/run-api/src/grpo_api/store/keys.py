"""The keys of a run, and how metadata is written in them.

    trainer            hash   registration (JSON), batch_size, id, step, started
    environments       hash   env_id → registration (JSON)
    environment_names  hash   env_id → name
    name_counts        hash   desired name → environments that asked for it
    connected          set    env_ids that have not left
    seen               hash   env_id → Redis' time of its last poll (ms)
    buffers            hash   env_id → parts that wait, oldest first: groups, as below
    queue              zset   bundles, all scored 0, so that they sort by kind and then by age
    payloads           hash   group id → compressed JSON: buffered, queued and leased groups
    queued_kinds       hash   "env_id sequences" → bundles in the queue
    queued_sizes       hash   sequences of a group → groups in the queue
    lease              hash   poll, groups (ids), sequences, step: the batch handed out last
    latest             hash   id of the last queued group; acknowledged: its batch is done
    last_group_id      string
    receipt:<id>       string answers to calls that must not happen twice, short-lived

    A group reads   "id:sequences:stored_bytes"
    A bundle reads  "env_id sequences id groups", the id in 16 digits, groups joined by ","

An env_id is "-" where the data came without one. The sort order of the queue gives the oldest
bundles of each kind by range, which is all that planning reads.
"""

from __future__ import annotations

import uuid

from grpo_api.bundles import Bundle, StoredGroup
from grpo_api.exact_sums import Kind
from grpo_api.redis_link import RedisLink

NO_ENVIRONMENT = "-"
RECEIPT_S = 600
"""Longer than any request keeps trying to reach Redis."""

STATE_KEYS = (
    *("trainer", "environments", "environment_names", "name_counts", "connected", "seen"),
    *("buffers", "queue", "payloads", "queued_kinds", "queued_sizes", "lease", "latest"),
    "last_group_id",
)


def keys(link: RedisLink, *names: str) -> list[str]:
    return [link.prefix + name for name in names]


def receipt() -> str:
    return f"receipt:{uuid.uuid4().hex}"


def env_field(env_id: int | None) -> str:
    return NO_ENVIRONMENT if env_id is None else str(env_id)


def parse_env(field: str) -> int | None:
    return None if field == NO_ENVIRONMENT else int(field)


def parse_kind(field: bytes) -> Kind:
    env_id, sequences = field.decode().split()
    return Kind(parse_env(env_id), int(sequences))


def write_groups(groups: tuple[StoredGroup, ...]) -> str:
    return ",".join(f"{group.id}:{group.sequences}:{group.stored_bytes}" for group in groups)


def parse_groups(written: str) -> tuple[StoredGroup, ...]:
    groups = (map(int, group.split(":")) for group in written.split(",") if group)
    return tuple(StoredGroup(*fields) for fields in groups)


def write_bundle(bundle: Bundle) -> str:
    kind = f"{env_field(bundle.env_id)} {bundle.sequences}"
    return f"{kind} {bundle.id:016d} {write_groups(bundle.groups)}"


def parse_bundle(entry: bytes) -> Bundle:
    env_id, _, bundle_id, groups = entry.decode().split()
    return Bundle(int(bundle_id), parse_env(env_id), parse_groups(groups))
