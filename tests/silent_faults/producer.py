"""An environment with a fault: samples groups on a real server, changes them, and submits them to
a real run-api."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx

from grpo_core.clients.inference import BridgeClient, GenerateAnswer
from grpo_core.wire.fields import PROMPT_LOGPROB
from grpo_core.wire.scored_group import RolloutFacts, ScoredGroup
from grpo_env.rollout.groups import TrainingSequence
from tests.fixtures.inference import InferenceServer
from tests.silent_faults.exercise import GROUP_SIZE, TINY, Exercise, TokenIds, tokenizer_of
from tests.support.wait import wait_for

FAULT_FROM = 1
"""Number of batches before the fault, of which repeated ones are copies."""
DEADLINE_S = 600.0
SUMS = [(a, b) for a in range(10) for b in range(10)]
FIRST, OTHERS = SUMS[::7], [numbers for numbers in SUMS[::3] if numbers not in SUMS[::7]]
"""No sum occurs twice in the first batches. Otherwise two groups of one version and one sum would
often be identical and count as repeated."""

Change = Callable[[ScoredGroup, TokenIds], ScoredGroup]


def unchanged(group: ScoredGroup, _: TokenIds) -> ScoredGroup:
    return group


@dataclass
class Producer:
    """Samples a batch for each step of the trainer.

    Args:
        exercise: for the server's model
        change: applied to every group before it is submitted
        changes_one: apply the change to the first group of a batch alone
        sampling: options of `/generate` that the groups do not state
        cuts_off: completions are shorter than most answers with their end token
        states: sampling options that the groups state, from the fault on
        rescores: replace the logprobs by those of the whole distribution at temperature 1
        system: system message of every prompt, from the start
        receipts: pass on the server's receipts
        sends_twice: the second group of a batch is the first one again, under another key
        batches_late: the number of batches that are sampled after a batch before it is submitted,
            and so of steps between sampling and training, however fast both are
        repeats: the first batch is submitted again and again
        paced: True to sample one batch per step; False to sample without waiting
    """

    server: InferenceServer
    api_url: str
    exercise: Exercise = TINY
    change: Change = unchanged
    changes_one: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)
    cuts_off: bool = False
    rescores: bool = False
    system: str = ""
    receipts: bool = True
    sends_twice: bool = False
    batches_late: int = 0
    repeats: bool = False
    paced: bool = True

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._http = httpx.Client(timeout=DEADLINE_S)
        self._bridge = BridgeClient(self.server.url)
        self._tokenizer = tokenizer_of(self.server.model)
        self._ids = TokenIds.of(self._tokenizer)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Produce groups in the background. Errors are raised at the end of the block."""
        with (
            self._http,
            self._bridge,
            ThreadPoolExecutor(1 + self.exercise.groups_per_batch) as self._pool,
        ):
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
        sampled: list[list[ScoredGroup]] = []
        for number in itertools.count():
            if number == 0 or (self.paced and number > self.batches_late):
                version = self._version_other_than(version)
            if self._stop.is_set():
                return
            is_faulty = number >= FAULT_FROM
            chosen = itertools.islice(sums, self.exercise.groups_per_batch)
            groups = list(self._pool.map(partial(self._sample, is_faulty), chosen))
            if is_faulty:
                groups = self._changed(groups)
            if is_faulty and self.sends_twice:
                groups[1] = groups[0]
            sampled.append(sampled[0] if is_faulty and self.repeats else groups)
            if number >= self.batches_late:
                self._send(sampled[number - self.batches_late])

    def _send(self, batch: list[ScoredGroup]) -> None:
        for group in batch:
            answer = self._http.post(f"{self.api_url}/scored_data", json=group.model_dump())
            answer.raise_for_status()

    def _changed(self, groups: list[ScoredGroup]) -> list[ScoredGroup]:
        count = 1 if self.changes_one else len(groups)
        return [self.change(group, self._ids) for group in groups[:count]] + groups[count:]

    def _sample(self, is_faulty: bool, numbers: tuple[int, int]) -> ScoredGroup:
        exercise = self.exercise
        max_tokens = exercise.cut_off_at if is_faulty and self.cuts_off else exercise.max_tokens
        sampling = self.sampling if is_faulty else {}
        prompt = self._prompt(*numbers)
        started = time.monotonic()
        body = {
            **{"prompt": {"prompt_token_ids": prompt}, "n": GROUP_SIZE, "max_tokens": max_tokens},
            **({"temperature": 1.0, "logprobs": 0} | sampling),
        }
        answer = self._http.post(f"{self.server.url}/generate", json=body).raise_for_status()
        completions = GenerateAnswer.model_validate(answer.json()).completions()
        facts = RolloutFacts(
            policy_version=[(c.first_version, c.last_version) for c in completions],
            generation_seconds=time.monotonic() - started,
        )
        sequences = [TrainingSequence().add_prompt(prompt).add_completion(c) for c in completions]
        scores = [float(self.exercise.is_right(numbers, c.text)) for c in completions]
        states = self.states if is_faulty else {}
        receipts = [*map(TrainingSequence.receipt, sequences, scores)]
        group = ScoredGroup(
            tokens=[sequence.tokens for sequence in sequences],
            masks=[sequence.masks for sequence in sequences],
            inference_logprobs=[sequence.logprobs for sequence in sequences],
            scores=scores,
            generation_params={"temperature": 1.0, "max_tokens": max_tokens} | states,
            group_overrides=facts.on_the_wire(),
            overrides=receipts if self.receipts else None,
        )
        return self._rescored(group) if is_faulty and self.rescores else group

    def _rescored(self, group: ScoredGroup) -> ScoredGroup:
        rows = []
        for tokens, logged in zip(group.tokens, group.inference_logprobs or [], strict=True):
            whole = [PROMPT_LOGPROB, *self._bridge.prompt_logprobs(tokens)]
            rows.append(
                [
                    old if old == PROMPT_LOGPROB else new
                    for old, new in zip(logged, whole, strict=True)
                ]
            )
        return group.model_copy(update={"inference_logprobs": rows})

    def _prompt(self, a: int, b: int) -> list[int]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        text = self._tokenizer.apply_chat_template(
            [*system, *self.exercise.question(a, b)], tokenize=False, add_generation_prompt=True
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
