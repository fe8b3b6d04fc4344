"""Samples in this process, from the policy that is trained."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
from transformers import GenerationConfig

from grpo_core.clients.inference import GenerateAnswer
from grpo_core.tree.trainer import TrainerSettings
from grpo_core.wire.policy_version import PolicyVersion
from grpo_env.inference.server import Home
from grpo_trainer.checks.served_weights import Bound
from grpo_trainer.errors import PolicyMismatch
from grpo_trainer.model.loading import TrainedWeights, device_to_load_on
from grpo_trainer.model.logprobs import logprobs_of
from grpo_trainer.model.policy import (
    CausalLM,
    device_of,
    end_tokens_of,
    require_known,
    uncompiled,
    vocabulary_of,
)
from grpo_trainer.optim.master_optimizer import MasterOptimizer
from grpo_trainer.weight_sync.base import Published

LOGITS_AT_ONCE = 1 << 28
"""transformers returns the logits of all tokens at the end of a pass: 1 GiB in float32. Completions
beyond that are sampled in further passes."""
_GREEDY = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}


class LocalGeneration:
    """A source of completions by transformers.

    Args:
        policy: the model
        tokenizer: its tokenizer
        version: returns the version of the policy's weights
        seed: of random numbers that are the same for a prompt whenever it is sampled; None: the
            random numbers of the process

    Raises:
        PolicyMismatch: the model names no token that ends a completion.
    """

    def __init__(
        self,
        policy: CausalLM,
        tokenizer: Any,
        version: Callable[[], PolicyVersion],
        seed: int | None = None,
    ) -> None:
        self._policy = policy
        self._tokenizer = tokenizer
        self._version = version
        self._seed = seed
        self._ends = end_tokens_of(policy)
        if not self._ends:
            raise PolicyMismatch(
                "--model names no end token, so no completion would end; add eos_token_id to its "
                "generation_config.json, with the id of the tokenizer's eos_token"
            )
        self._plain = GenerationConfig(eos_token_id=[*self._ends], pad_token_id=min(self._ends))

    async def generate(
        self,
        prompt_token_ids: list[int],
        home: Home | None = None,  # noqa: ARG002 - there is one server
        **sampling: Any,
    ) -> GenerateAnswer:
        """Sample n completions in one pass; the parameters have vLLM's names.

        Their logprobs are those of softmax(logits / temperature), and those of the logits
        themselves at temperature 0.

        Raises:
            PolicyMismatch: the model does not have a token of the prompt.
        """
        require_known(prompt_token_ids, self._policy)
        max_tokens, n = sampling.pop("max_tokens"), sampling.pop("n", 1)
        temperature, stop = sampling.pop("temperature", 1.0), sampling.pop("stop", None)
        chosen = {"do_sample": True, "temperature": temperature, "top_k": 0} | sampling
        options = (_GREEDY if temperature == 0 else chosen) | {"max_new_tokens": max_tokens}
        if stop:
            options |= {"stop_strings": stop, "tokenizer": self._tokenizer}
        # Padding behind a stop text would look like sampled end tokens, so each is sampled alone.
        most = LOGITS_AT_ONCE // (max_tokens * vocabulary_of(self._policy))
        at_once = 1 if stop else max(1, most)
        parts = [min(at_once, n - start) for start in range(0, n, at_once)]
        with (
            self._random_numbers(prompt_token_ids),
            self._without_the_models_defaults(),
            uncompiled(),
        ):
            found = [self._sampled(prompt_token_ids, part, temperature, options) for part in parts]
        rows = [row for part in found for row in part]
        return self._answer(prompt_token_ids, rows, max_tokens, stop or ())

    def _sampled(
        self, prompt_token_ids: list[int], n: int, temperature: float, options: dict[str, Any]
    ) -> list[tuple[list[int], list[float]]]:
        """Token ids and logprobs of each completion."""
        prompt = torch.tensor([prompt_token_ids], device=device_of(self._policy))
        found = self._policy.generate(  # type: ignore[attr-defined]
            prompt,
            attention_mask=torch.ones_like(prompt),
            num_return_sequences=n,
            return_dict_in_generate=True,
            output_logits=True,
            synced_gpus=False,  # with --fsdp the other ranks follow each pass, and do not sample
            **options,
        )
        tokens = found.sequences[:, len(prompt_token_ids) :]  # [n, T]
        steps = zip(found.logits, tokens.split(1, dim=1), strict=True)  # [n, V] and [n, 1] of each
        columns = [
            torch.log_softmax(logits.float() / (temperature or 1.0), -1).gather(-1, token)
            for logits, token in steps
        ]
        logp = torch.cat(columns, dim=1)  # [n, T]
        pairs = zip(tokens.tolist(), logp.tolist(), strict=True)
        return [self._up_to_end(*pair) for pair in pairs]

    def _up_to_end(self, row: list[int], logp: list[float]) -> tuple[list[int], list[float]]:
        ends = (at + 1 for at, token in enumerate(row) if token in self._ends)
        length = next(ends, len(row))
        return row[:length], logp[:length]

    def _answer(
        self,
        prompt: list[int],
        rows: list[tuple[list[int], list[float]]],
        max_tokens: int,
        stop: Sequence[str],
    ) -> GenerateAnswer:
        version = self._version()
        return GenerateAnswer(
            text=[self._text(row, stop) for row, _ in rows],
            prompt=self._tokenizer.decode(prompt),
            finish_reasons=[
                "length" if len(row) == max_tokens and row[-1] not in self._ends else "stop"
                for row, _ in rows
            ],
            logprobs=[
                [[{token: value}] for token, value in zip(row, logp, strict=True)]
                for row, logp in rows
            ],
            prompt_token_ids=prompt,
            token_ids=[row for row, _ in rows],
            policy_version=[(version, version)] * len(rows),
        )

    def _text(self, row: list[int], stop: Sequence[str]) -> str:
        """Without the text that ended the completion, as vLLM returns it."""
        text: str = self._tokenizer.decode(row, skip_special_tokens=True)
        return text[: min((text.find(end) for end in stop if end in text), default=len(text))]

    @contextlib.contextmanager
    def _without_the_models_defaults(self) -> Iterator[None]:
        """Models bring sampling parameters of their own, such as top_p, for what is not given."""
        policy: Any = self._policy
        models, policy.generation_config = policy.generation_config, self._plain
        try:
            yield
        finally:
            policy.generation_config = models

    @contextlib.contextmanager
    def _random_numbers(self, prompt: list[int]) -> Iterator[None]:
        if self._seed is None:
            yield
            return
        device = device_of(self._policy)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(self._seed + crc32(repr(prompt).encode()))
            yield


@dataclass(eq=False)
class WeightsInProcess:
    """A `WeightSync` without a server. `samples`: rollouts are sampled from the policy.
    `version`: of its weights."""

    settings: TrainerSettings
    samples: bool
    version: PolicyVersion = field(init=False, default=PolicyVersion(0, 0))
    begun_as: PolicyVersion | None = field(init=False, default=None)
    epochs: Container[int] | None = field(init=False, default=None)
    server_run_id: str | None = field(init=False, default=None)
    policy: CausalLM = field(init=False)

    def load_policy(self, restoring: bool = False) -> CausalLM:  # noqa: ARG002
        """Raises `NoSuchDevice`, `PolicyMismatch`."""
        device, dtype = device_to_load_on(self.settings.device), getattr(torch, self.settings.dtype)
        self.policy = TrainedWeights.of(self.settings).load(dtype, device)
        return self.policy

    def start(
        self,
        optimizer: MasterOptimizer,
        step: int,
        last_epoch: int = 0,
        bound: Bound | None = None,
    ) -> PolicyVersion:
        if bound is not None and self.samples:
            bound.learn(0.0)  # the policy's own logprobs have no noise
        optimizer.write_into_parameters()
        self.version = PolicyVersion(last_epoch + 1, step)
        return self.version

    def publish(self, optimizer: MasterOptimizer, step: int) -> Published:
        optimizer.write_into_parameters()
        self.version = PolicyVersion(self.version.epoch, step)
        return Published(self.version, 0.0)

    def recover_server(self) -> None:
        """There is no server."""

    def served_logprobs(self, token_ids: list[int]) -> list[float]:
        found: list[float] = logprobs_of(self.policy, token_ids).tolist()
        return found

    def close(self) -> None:
        """Nothing is open."""
