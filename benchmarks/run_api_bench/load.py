"""The load: scored groups as JSON, and the requests of environments and trainers.

A full-size group is 8 sequences of 128 prompt and 896 completion tokens, about 270 kB of JSON. A
tiny group is 8 sequences of 1 and 3 tokens. Both have the format of Atropos environments.
"""

from __future__ import annotations

import gzip
import json
import random
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle, islice
from typing import Any

from benchmarks.run_api_bench.connection import ApiAnswer, ApiBenchmarkFailed, Body, Connection
from benchmarks.run_api_bench.servers import RunningServer
from grpo_core.wire.fields import MASKED, PROMPT_LOGPROB

VOCABULARY = 150_000
GROUP_SIZE = 8
BATCH_SEQUENCES = 64
CONNECTIONS = 8
AS_REQUESTS_ASKS = {"Accept-Encoding": "gzip, deflate", "Accept": "*/*"}
"""Headers of the `requests` library, which Atropos trainers use."""
_GZIP_FROM_BYTES = 1024
_GZIP_WINDOW_BITS = 31
_ZEROS = bytes(1 << 20)
_GROUPS_PER_LIST = 250
_SEED = 0


@dataclass(frozen=True)
class Sizes:
    """Amounts of the load. `depths`: of the queue, in groups. `in_flight`: connections of the
    crowd. `idle_s`: how long an idle server is probed."""

    distinct_groups: int
    depths: tuple[int, ...]
    submissions: int
    in_flight: int
    idle_s: float
    large_body_bytes: int
    bomb_bytes: int
    large_batch_sequences: int
    long_list_groups: int


FULL = Sizes(
    distinct_groups=64,
    depths=(0, 1_000, 10_000),
    submissions=512,
    in_flight=512,
    idle_s=3.0,
    large_body_bytes=30_000_000,
    bomb_bytes=1 << 30,
    large_batch_sequences=1_024,
    long_list_groups=1_000,
)
QUICK = Sizes(
    distinct_groups=16,
    depths=(0, 1_000),
    submissions=64,
    in_flight=64,
    idle_s=1.0,
    large_body_bytes=10_000_000,
    bomb_bytes=1 << 27,
    large_batch_sequences=256,
    long_list_groups=500,
)


class Workload:
    """Bodies of requests, the same bytes in every process and run."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        rng = random.Random(_SEED)
        groups = [scored_group(rng, 128, 896) for _ in range(sizes.distinct_groups)]
        self._texts = [json.dumps(group) for group in groups]
        self.full_size = [as_atropos_sends(text) for text in self._texts]
        """Bodies of `POST /scored_data`, one group each, of the environment with id 0."""

    @cached_property
    def large_valid(self) -> Body:
        """Body of `POST /scored_data_list`."""
        return _packed_list(self._large_texts())

    @cached_property
    def large_invalid(self) -> Body:
        """The same, with a word for the last number of the last group."""
        texts = self._large_texts()
        spoilt = json.loads(texts[-1])
        spoilt["inference_logprobs"][-1][-1] = "none"
        return _packed_list([*texts[:-1], json.dumps(spoilt)])

    @cached_property
    def bomb(self) -> Body:
        """A body of zeros, gzip-encoded to a thousandth of `Sizes.bomb_bytes`."""
        packer = zlib.compressobj(wbits=_GZIP_WINDOW_BITS)
        pieces = [packer.compress(_ZEROS) for _ in range(self._sizes.bomb_bytes // len(_ZEROS))]
        return _packed(b"".join([*pieces, packer.flush()]))

    def _large_texts(self) -> list[str]:
        longest = max(len(text) for text in self._texts) + 1
        return list(islice(cycle(self._texts), self._sizes.large_body_bytes // longest))


def tiny_groups(count: int, env_ids: Sequence[int] = (0,)) -> Body:
    """Body of `POST /scored_data_list`: `count` groups, of each environment in turn."""
    rng = random.Random(_SEED)
    groups = [scored_group(rng, 1, 3, env_id) for env_id in islice(cycle(env_ids), count)]
    return as_atropos_sends(json.dumps(groups))


def scored_group(
    rng: random.Random, prompt_tokens: int, completion_tokens: int, env_id: int = 0
) -> dict[str, Any]:
    """Random tokens, log-probabilities with all their digits, and the keys that
    `atroposlib.envs.base` adds."""
    prompt = [rng.randrange(VOCABULARY) for _ in range(prompt_tokens)]
    completions = [
        [rng.randrange(VOCABULARY) for _ in range(completion_tokens)] for _ in range(GROUP_SIZE)
    ]
    return {
        "tokens": [prompt + completion for completion in completions],
        "masks": [[MASKED] * len(prompt) + completion for completion in completions],
        "scores": [rng.random() for _ in completions],
        "inference_logprobs": [
            [PROMPT_LOGPROB] * len(prompt) + [-rng.expovariate(2.0) for _ in completion]
            for completion in completions
        ],
        **{key: [] for key in ("advantages", "ref_logprobs", "messages", "overrides", "images")},
        **{"group_overrides": {}, "distill_token_ids": None, "distill_logprobs": None},
        "env_id": env_id,
    }


def as_atropos_sends(text: str) -> Body:
    """As `BaseEnv._post_json_with_compression` of atroposlib 0.4.0 does."""
    plain = text.encode()
    packed = gzip.compress(plain) if len(plain) >= _GZIP_FROM_BYTES else plain
    if len(packed) < len(plain):
        return _packed(packed)
    return Body(plain, {"Content-Type": "application/json"})


def _packed_list(texts: Sequence[str]) -> Body:
    # The level hardly changes the time of decompression.
    return _packed(gzip.compress(f"[{','.join(texts)}]".encode(), compresslevel=1))


def _packed(content: bytes) -> Body:
    return Body(content, {"Content-Type": "application/json", "Content-Encoding": "gzip"})


def start_run(
    server: RunningServer, batch_sequences: int = BATCH_SEQUENCES, environments: int = 1
) -> None:
    """Reset the server, and register a trainer and environments with ids from 0 on.

    Raises:
        ApiBenchmarkFailed: the server did not take them.
    """
    with Connection(server.port) as connection:
        connection.get("/reset_data")
        server.forget_env_ids()
        connection.send_json("POST", "/register", _trainer(batch_sequences))
        # atroposlib accepts environments once the trainer has asked for its first batch
        connection.get("/batch")
        for expected_id in range(environments):
            answer = connection.send_json("POST", "/register-env", _ENVIRONMENT).json()
            if answer.get("env_id") != expected_id:
                raise ApiBenchmarkFailed(f"POST /register-env: env_id {expected_id}, got {answer}")


def fill(port: int, groups: int, env_ids: Sequence[int] = (0,)) -> None:
    """Queue tiny groups, of each environment in turn."""
    with Connection(port) as connection:
        for sent in range(0, groups, _GROUPS_PER_LIST):
            count = min(_GROUPS_PER_LIST, groups - sent)
            connection.post("/scored_data_list", tiny_groups(count, env_ids))


@dataclass(frozen=True)
class SubmissionReport:
    """`generator_cpu_s`: CPU time of the sending process."""

    groups_per_s: float
    generator_cpu_s: float


def submit(port: int, bodies: Sequence[Body], count: int) -> SubmissionReport:
    """Send `count` groups, one per request, over 8 connections at once."""
    every = list(islice(cycle(bodies), count))
    shares = [every[first::CONNECTIONS] for first in range(CONNECTIONS)]
    began, cpu_began = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(CONNECTIONS) as senders:
        list(senders.map(_submit_share, [port] * CONNECTIONS, shares))
    seconds = time.perf_counter() - began
    return SubmissionReport(count / seconds, time.process_time() - cpu_began)


def _submit_share(port: int, bodies: Sequence[Body]) -> None:
    with Connection(port) as connection:
        for body in bodies:
            connection.post("/scored_data", body)


def fetch_batch(port: int, sequences: int = BATCH_SEQUENCES) -> ApiAnswer:
    """`GET /batch` as a trainer sends it.

    Raises:
        ApiBenchmarkFailed: the answer is not a batch of `sequences` sequences.
    """
    with Connection(port) as connection:
        connection.get("/status")  # connects: the answer's time is that of the request alone
        answer = connection.get("/batch", AS_REQUESTS_ASKS)
    groups = answer.json()["batch"]
    received = sum(len(group["tokens"]) for group in groups or [])
    if received != sequences:
        raise ApiBenchmarkFailed(f"GET /batch: {received} sequences instead of {sequences}")
    return answer


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


_ENVIRONMENT = {
    "max_token_length": 2048,
    "desired_name": "benchmark",
    "weight": 1.0,
    "group_size": GROUP_SIZE,
    "min_batch_allocation": None,
}
