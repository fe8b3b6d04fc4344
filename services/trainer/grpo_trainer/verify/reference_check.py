"""Checks that the reference model stays as it was at the start."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from grpo_trainer.model.logprobs import logprobs_of, probe_tokens, tolerance_of
from grpo_trainer.model.policy import vocabulary_of
from grpo_trainer.model.reference import Reference
from grpo_trainer.verify.findings import CheckName, Finding

EVERY_STEPS = 4
PROBE_TOKENS = 16


class ReferenceCheck:
    """Create it before the first update: it remembers the reference model's logprobs of fixed
    tokens."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        vocabulary = vocabulary_of(reference.model)
        self._tokens = probe_tokens(vocabulary, PROBE_TOKENS)
        self._first = self._logprobs()
        self._tolerance = tolerance_of(reference.model)

    def findings(self, step: int) -> Iterator[Finding]:
        if step % EVERY_STEPS:
            return
        moved = float((self._logprobs() - self._first).abs().mean())
        if moved > self._tolerance:
            yield Finding(
                CheckName.REFERENCE_MOVED,
                None,
                f"the reference model's logprobs of {PROBE_TOKENS} fixed tokens changed by "
                f"{moved:.2g} on average since the start, so the KL penalty no longer holds the "
                "policy near --model",
                "the reference model must share no trained weights with the policy: in the LoRA "
                "modes, check that only the adapter is trained",
            )

    def _logprobs(self) -> torch.Tensor:
        with self._reference.active():
            return logprobs_of(self._reference.model, self._tokens)
