"""Compares a few tokens, sampled at temperature 1, with the trainer's policy.

The logprobs of rollouts that are sampled with top_p, top_k or a repetition penalty are not those of
the policy, so the trainer's own check of rollouts is off then. This one needs no rollout.
"""

from __future__ import annotations

import torch

from grpo_env.rollout.engine import RolloutEngine
from grpo_offline.errors import StaleServer
from grpo_trainer.checks.served_weights import START_FACTOR
from grpo_trainer.model.logprobs import logprobs_of, probe_tokens, tolerance_of
from grpo_trainer.model.policy import CausalLM, vocabulary_of

PROMPT_TOKENS, SAMPLED_TOKENS = 16, 8


async def require_own_policy(engine: RolloutEngine, policy: CausalLM) -> None:
    """Raises:
    StaleServer: the logprobs of sampled tokens are not the policy's.
    ServiceUnavailable, ProtocolViolation: the errors of `RolloutEngine.sample_plainly`.
    """
    prompt = probe_tokens(vocabulary_of(policy), PROMPT_TOKENS)
    completion = await engine.sample_plainly(prompt, SAMPLED_TOKENS)
    ours = logprobs_of(policy, [*prompt, *completion.token_ids])[len(prompt) - 1 :]  # [K]
    off = float((ours - torch.tensor(completion.logprobs)).abs().mean())
    allowed = START_FACTOR * tolerance_of(policy)
    if not off <= allowed:
        raise StaleServer(
            f"the logprobs of {len(completion.token_ids)} tokens, sampled at temperature 1 before "
            f"the rollouts of this iteration, differ from those of the trainer's policy by "
            f"{off:.2g} on average (allowed {allowed:.2g}), so the rollouts would not be the "
            "policy's. Check that generation.base_url is the server of this run; with "
            "generation.backend=local, report a bug"
        )
