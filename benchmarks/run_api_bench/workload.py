"""What is sent: scored groups as JSON, built before anything is measured.

A full-size group is 8 sequences of 128 prompt and 896 completion tokens, about 270 kB of JSON. A
tiny one is 8 sequences of 1 and 3. Both are spelled as Atropos environments spell them.
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle, islice
from typing import Any

from benchmarks.run_api_bench.settings import Sizes
from grpo_core.wire.fields import MASKED, PROMPT_LOGPROB

VOCABULARY = 150_000
GZIP_FROM_BYTES = 1024
_GZIP_WINDOW_BITS = 31
_ZEROS = bytes(1 << 20)
_FAST = 1
_SEED = 0


@dataclass(frozen=True)
class GroupShape:
    sequences: int
    prompt_tokens: int
    completion_tokens: int


FULL_SIZE = GroupShape(sequences=8, prompt_tokens=128, completion_tokens=896)
TINY = GroupShape(sequences=8, prompt_tokens=1, completion_tokens=3)


@dataclass(frozen=True)
class Body:
    """A request body with the headers that describe it."""

    content: bytes
    headers: Mapping[str, str]


class Workload:
    """Deterministic: every process and run sends the same bytes."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        rng = random.Random(_SEED)
        groups = [scored_group(rng, FULL_SIZE) for _ in range(sizes.distinct_groups)]
        self._texts = [json.dumps(group) for group in groups]
        self.full_size = [as_atropos_sends(text) for text in self._texts]
        """Bodies of `POST /scored_data`, one group each, of the environment with id 0."""

    @cached_property
    def large_valid(self) -> Body:
        """Body of `POST /scored_data_list`."""
        return _list_body(self._large_texts())

    @cached_property
    def large_invalid(self) -> Body:
        """The same, with a word for the last number of the last group."""
        texts = self._large_texts()
        spoilt = json.loads(texts[-1])
        spoilt["inference_logprobs"][-1][-1] = "none"
        return _list_body([*texts[:-1], json.dumps(spoilt)])

    @cached_property
    def long_list(self) -> Body:
        """Body of `POST /scored_data_list`: many tiny groups."""
        return tiny_groups(self._sizes.long_list_groups, env_ids=[0])

    @cached_property
    def bomb(self) -> Body:
        """A body of `Sizes.bomb_bytes` zeros, gzip-encoded to a thousandth of that."""
        packer = zlib.compressobj(wbits=_GZIP_WINDOW_BITS)
        pieces = [packer.compress(_ZEROS) for _ in range(self._sizes.bomb_bytes // len(_ZEROS))]
        return Body(b"".join([*pieces, packer.flush()]), _headers(is_gzip=True))

    def _large_texts(self) -> list[str]:
        return self._as_many_as_fit(self._texts)

    def _as_many_as_fit(self, texts: Sequence[str]) -> list[str]:
        """Into `Sizes.large_body_bytes`, with a comma behind each."""
        longest = max(len(text) for text in texts) + 1
        return list(islice(cycle(texts), self._sizes.large_body_bytes // longest))


def tiny_groups(count: int, env_ids: Sequence[int]) -> Body:
    """Body of `POST /scored_data_list`: `count` groups, of each environment in turn."""
    rng = random.Random(_SEED)
    senders = islice(cycle(env_ids), count)
    groups = [scored_group(rng, TINY, env_id) for env_id in senders]
    return as_atropos_sends(json.dumps(groups))


def scored_group(rng: random.Random, shape: GroupShape, env_id: int = 0) -> dict[str, Any]:
    """One prompt, `shape.sequences` completions of random tokens, log-probabilities with all
    their digits, and the keys that `atroposlib.envs.base` adds before it sends."""
    prompt = _tokens(rng, shape.prompt_tokens)
    completions = [_tokens(rng, shape.completion_tokens) for _ in range(shape.sequences)]
    return {
        "tokens": [prompt + completion for completion in completions],
        "masks": [[MASKED] * len(prompt) + completion for completion in completions],
        "scores": [rng.random() for _ in completions],
        "inference_logprobs": [
            [PROMPT_LOGPROB] * len(prompt) + [-rng.expovariate(2.0) for _ in completion]
            for completion in completions
        ],
        "advantages": [],
        "ref_logprobs": [],
        "messages": [],
        "group_overrides": {},
        "overrides": [],
        "images": [],
        "distill_token_ids": None,
        "distill_logprobs": None,
        "env_id": env_id,
    }


def as_atropos_sends(text: str) -> Body:
    """As `BaseEnv._post_json_with_compression` of atroposlib 0.4.0 does."""
    plain = text.encode()
    packed = gzip.compress(plain) if len(plain) >= GZIP_FROM_BYTES else plain
    if len(packed) < len(plain):
        return Body(packed, _headers(is_gzip=True))
    return Body(plain, _headers(is_gzip=False))


def _list_body(texts: Sequence[str]) -> Body:
    # The level decides how long this takes, and hardly anything about decompressing it.
    content = gzip.compress(f"[{','.join(texts)}]".encode(), compresslevel=_FAST)
    return Body(content, _headers(is_gzip=True))


def _headers(*, is_gzip: bool) -> dict[str, str]:
    encoding = {"Content-Encoding": "gzip"} if is_gzip else {}
    return {"Content-Type": "application/json", **encoding}


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]
