"""Samples groups on a real server, changes them and submits them to a real run-api."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from transformers import AutoTokenizer

from grpo_core.clients.inference import GenerateAnswer
from grpo_core.wire.scored_group import RolloutFacts, ScoredGroup
from grpo_env.rollout.training_sequences import align_group
from tests.fixtures.inference import InferenceServer
from tests.support.wait import wait_for

GROUP_SIZE, GROUPS_PER_BATCH = 4, 8
DEADLINE_S = 300.0
SUMS = [(a, b) for a in range(10) for b in range(10)]
FIRST, OTHERS = SUMS[::7], [numbers for numbers in SUMS[::3] if numbers not in SUMS[::7]]
"""No sum occurs twice in the first batches. Otherwise two groups of one version and one sum would
often be identical and count as repeated."""

Change = Callable[[ScoredGroup], ScoredGroup]


def unchanged(group: ScoredGroup) -> ScoredGroup:
    return group


@dataclass
class Producer:
    """An environment that samples a batch for each step of the trainer.

    Args:
        change: applied to every group before it is submitted
        temperature: the sampling temperature; the groups report 1.0
        batches_late: the number of steps between sampling a batch and training on it
        repeats_after: after so many batches, the first one is submitted again and again
        paced: True to sample one batch per step; False to sample without waiting
    """

    server: InferenceServer
    api_url: str
    change: Change = unchanged
    temperature: float = 1.0
    batches_late: int = 0
    repeats_after: int | None = None
    paced: bool = True

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._http = httpx.Client(timeout=DEADLINE_S)
        self._tokenizer = AutoTokenizer.from_pretrained(self.server.model)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Produce groups in the background. Errors are raised at the end of the block."""
        with self._http, ThreadPoolExecutor(1 + GROUPS_PER_BATCH) as self._pool:
            producing = self._pool.submit(self._produce, self._version())
            try:
                yield
            finally:
                self._stop.set()
            producing.result(DEADLINE_S)

    def _produce(self, version: Any) -> None:
        """`version`: the version that is served before the trainer starts, which then sets a new
        one at every step."""
        sums = itertools.cycle(FIRST + OTHERS)
        held: deque[list[ScoredGroup]] = deque()
        sent: list[list[ScoredGroup]] = []
        for number in itertools.count():
            if number == 0 or (self.paced and number > self.batches_late):
                version = self._version_other_than(version)
            if self._stop.is_set():
                return
            sampled = self._pool.map(self._sample, itertools.islice(sums, GROUPS_PER_BATCH))
            held.append([self.change(group) for group in sampled])
            if number >= self.batches_late:
                fresh = held.popleft()
                repeats = self.repeats_after is not None and len(sent) >= self.repeats_after
                sent.append(sent[0] if repeats else fresh)
                self._send(sent[-1])

    def _send(self, batch: list[ScoredGroup]) -> None:
        for group in batch:
            answer = self._http.post(f"{self.api_url}/scored_data", json=group.model_dump())
            answer.raise_for_status()

    def _sample(self, numbers: tuple[int, int]) -> ScoredGroup:
        a, b = numbers
        prompt = self._prompt(f"{a}+{b}=")
        started = time.monotonic()
        body = {
            **{"prompt": {"prompt_token_ids": prompt}, "n": GROUP_SIZE, "max_tokens": 8},
            **{"temperature": self.temperature, "logprobs": 0},
        }
        answer = self._http.post(f"{self.server.url}/generate", json=body).raise_for_status()
        completions = GenerateAnswer.model_validate(answer.json()).completions()
        facts = RolloutFacts(
            policy_version=[(c.first_version, c.last_version) for c in completions],
            generation_seconds=time.monotonic() - started,
        )
        return ScoredGroup(
            **align_group(prompt, completions),
            scores=[float(c.text.strip() == str(a + b)) for c in completions],
            generation_params={"temperature": 1.0},
            group_overrides=facts.on_the_wire(),
        )

    def _prompt(self, question: str) -> list[int]:
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        ids: list[int] = self._tokenizer.encode(text)
        return ids

    def _version(self) -> Any:
        return self._http.get(f"{self.server.url}/bridge/info").json()["policy_version"]

    def _version_other_than(self, before: Any) -> Any:
        """Returns early when the producer stops."""
        return wait_for(
            self._version, lambda version: version != before or self._stop.is_set(), DEADLINE_S
        )
