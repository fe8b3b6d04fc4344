"""What environments and trainers do to a server, as fast as one process can."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, islice

from benchmarks.run_api_bench.connection import ApiAnswer, Connection
from benchmarks.run_api_bench.errors import ApiBenchmarkFailed
from benchmarks.run_api_bench.systems import RunningServer
from benchmarks.run_api_bench.workload import FULL_SIZE, Body, tiny_groups

BATCH_SEQUENCES = 64
CONNECTIONS = 8
AS_REQUESTS_ASKS = {"Accept-Encoding": "gzip, deflate", "Accept": "*/*"}
"""Headers of the `requests` library, which Atropos trainers use."""
_GROUPS_PER_LIST = 250


@dataclass(frozen=True)
class SubmissionReport:
    groups_per_s: float
    generator_cpu_s: float
    """What sending cost this process."""


def start_run(
    server: RunningServer,
    batch_sequences: int = BATCH_SEQUENCES,
    minimums: Sequence[float | None] = (None,),
) -> None:
    """Forget what the server holds, register a trainer, and an environment per minimum.

    Environments are served ids from 0 on.

    Raises:
        BenchmarkFailed: the server did not take them.
    """
    with Connection(server.port) as connection:
        connection.get("/reset_data")
        server.forget_env_ids()
        connection.send_json("POST", "/register", _trainer(batch_sequences))
        # atroposlib lets environments in once the trainer has asked for its first batch
        connection.get("/batch")
        for expected_id, minimum in enumerate(minimums):
            answer = connection.send_json("POST", "/register-env", _environment(minimum)).json()
            if answer.get("env_id") != expected_id:
                raise ApiBenchmarkFailed(f"POST /register-env: env_id {expected_id}, got {answer}")


def fill(port: int, groups: int, env_ids: Sequence[int] = (0,)) -> None:
    """Queue tiny groups, of each environment in turn."""
    with Connection(port) as connection:
        for sent in range(0, groups, _GROUPS_PER_LIST):
            count = min(_GROUPS_PER_LIST, groups - sent)
            connection.post("/scored_data_list", tiny_groups(count, env_ids))


def submit(port: int, bodies: Sequence[Body], count: int) -> SubmissionReport:
    """Send `count` groups, one per request, over 8 connections at once."""
    every = list(islice(cycle(bodies), count))
    shares = [every[first::CONNECTIONS] for first in range(CONNECTIONS)]
    began, cpu_began = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(CONNECTIONS) as senders:
        for finished in [senders.submit(_submit_share, port, share) for share in shares]:
            finished.result()
    seconds = time.perf_counter() - began
    return SubmissionReport(count / seconds, time.process_time() - cpu_began)


def poll_status_env(port: int, count: int) -> list[float]:
    """Seconds of each of `count` polls, one after the other."""
    with Connection(port) as connection:
        return [
            connection.send_json("GET", "/status-env", {"env_id": 0}).seconds for _ in range(count)
        ]


def fetch_batch(port: int, sequences: int = BATCH_SEQUENCES) -> ApiAnswer:
    """`GET /batch` as a trainer sends it.

    Raises:
        BenchmarkFailed: the answer is no batch of `sequences` sequences.
    """
    with Connection(port) as connection:
        connection.get("/status")  # connects: the answer's time is that of the request alone
        answer = connection.get("/batch", AS_REQUESTS_ASKS)
    groups = answer.json()["batch"]
    received = sum(len(group["tokens"]) for group in groups or [])
    if received != sequences:
        raise ApiBenchmarkFailed(f"GET /batch: {received} sequences instead of {sequences}")
    return answer


def _submit_share(port: int, bodies: Sequence[Body]) -> None:
    with Connection(port) as connection:
        for body in bodies:
            connection.post("/scored_data", body)


def _trainer(batch_sequences: int) -> dict[str, object]:
    return {
        "wandb_group": "benchmark",
        "wandb_project": "benchmark",
        "batch_size": batch_sequences,
        "max_token_len": 2048,
        "checkpoint_dir": "checkpoints",
        "save_checkpoint_interval": 0,
        "starting_step": 0,
        "num_steps": 1_000_000,
    }


def _environment(minimum: float | None) -> dict[str, object]:
    return {
        "max_token_length": 2048,
        "desired_name": "benchmark",
        "weight": 1.0,
        "group_size": FULL_SIZE.sequences,
        "min_batch_allocation": minimum,
    }
