"""Groups sampled for real from a real server, sent to a real run-api, with a fault on the way."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from transformers import AutoTokenizer

from grpo_core.inference_client import GenerateAnswer
from grpo_core.wire import RolloutFacts, ScoredGroup
from grpo_env.alignment import align_group
from tests.fixtures.inference import InferenceServer

GROUP_SIZE, GROUPS_PER_BATCH = 4, 8
DEADLINE_S = 300.0
SUMS = [(a, b) for a in range(10) for b in range(10)]
FIRST, OTHERS = SUMS[::7], [numbers for numbers in SUMS[::3] if numbers not in SUMS[::7]]
"""No sum twice in the first batches, which one version samples and which would often be alike."""

Fault = Callable[[ScoredGroup], ScoredGroup]


def honest(group: ScoredGroup) -> ScoredGroup:
    return group


@dataclass
class Producer:
    """What an environment does, paced by the steps of the trainer.

    Args:
        temperature: that really samples
        says: generation_params that the groups carry
        batches_late: how many steps lie between sampling a batch and training on it, from the
            first steps on, in which there were not so many
        healthy_batches: before the fault sets in
        repeats_after: once so many batches were sent, the first is sent again and again
    """

    server: InferenceServer
    api_url: str
    fault: Fault = honest
    temperature: float = 1.0
    says: dict[str, Any] = field(default_factory=lambda: {"temperature": 1.0})
    batches_late: int = 0
    healthy_batches: int = 0
    repeats_after: int | None = None

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._http = httpx.Client(timeout=DEADLINE_S)
        self._tokenizer = AutoTokenizer.from_pretrained(self.server.model)

    @contextmanager
    def running(self) -> Iterator[None]:
        """In the background; its own errors come out at the end of the block."""
        with self._http, ThreadPoolExecutor(1 + GROUPS_PER_BATCH) as self._pool:
            producing = self._pool.submit(self._produce, self._version())
            try:
                yield
            finally:
                self._stop.set()
            producing.result(DEADLINE_S)

    def _produce(self, version: Any) -> None:
        """Args: version: before the trainer, which names another at its start and every step."""
        sums = itertools.cycle(FIRST + OTHERS)
        held: deque[list[ScoredGroup]] = deque()
        sent: list[list[ScoredGroup]] = []
        for number in itertools.count():
            if number == 0 or number > self.batches_late:
                version = self._version_other_than(version)
            if self._stop.is_set():
                return
            sampled = self._pool.map(self._sample, itertools.islice(sums, GROUPS_PER_BATCH))
            held.append([g if number < self.healthy_batches else self.fault(g) for g in sampled])
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
        rows = align_group(prompt, completions)
        facts = RolloutFacts(
            policy_version=[(c.first_version, c.last_version) for c in completions],
            generation_seconds=time.monotonic() - started,
        )
        return ScoredGroup(
            tokens=[row.tokens for row in rows],
            masks=[row.masks for row in rows],
            scores=[float(c.text.strip() == str(a + b)) for c in completions],
            inference_logprobs=[row.inference_logprobs for row in rows],
            generation_params=self.says,
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
        deadline = time.monotonic() + DEADLINE_S
        while (version := self._version()) == before and not self._stop.is_set():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return version
