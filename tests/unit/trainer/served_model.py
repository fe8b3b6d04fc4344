"""A test server that computes with real weights and makes mistakes on request.

Like vLLM's, its prefix cache holds keys and values in whole blocks. A faulty change of the weights
keeps them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch

from grpo_core.clients.inference import Completion
from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.model.logprobs import logprobs_of

BLOCK = 16
UNTRAINED = PolicyVersion(0, 0)


@dataclass
class ServedModel:
    """Serves `model` under `version`. `noise`: error of each logprob, up or down."""

    model: Any
    version: PolicyVersion = UNTRAINED
    noise: float = 0.0
    blocks: dict[tuple[int, ...], Any] = field(default_factory=dict)

    def swap(self, model: Any, version: PolicyVersion, keep_cache: bool = False) -> None:
        self.model, self.version = copy.deepcopy(model), version
        if not keep_cache:
            self.blocks.clear()

    def served_logprobs(self, token_ids: list[int]) -> list[float]:
        """Computes without the cache, as vLLM does for the prompt's logprobs."""
        signs = torch.tensor([1.0, -1.0]).repeat(len(token_ids))[: len(token_ids) - 1]
        return (logprobs_of(self.model, token_ids) + self.noise * signs).tolist()

    @torch.no_grad()
    def sample(self, prompt_token_ids: list[int], max_tokens: int) -> Completion:
        known = tuple(prompt_token_ids[: (len(prompt_token_ids) - 1) // BLOCK * BLOCK])
        if known and known not in self.blocks:
            self.blocks[known] = self.model(torch.tensor([known]), use_cache=True).past_key_values
        past = copy.deepcopy(self.blocks.get(known))
        tokens, logprobs = [], []
        new = prompt_token_ids[len(known) :]
        for _ in range(max_tokens):
            out = self.model(torch.tensor([new]), past_key_values=past, use_cache=True)
            past, logp = out.past_key_values, out.logits[0, -1].float().log_softmax(-1)
            token = int(torch.multinomial(logp.exp(), 1))
            tokens.append(token)
            logprobs.append(float(logp[token]))
            new = [token]
        return Completion("", "length", tokens, logprobs, self.version, self.version)
