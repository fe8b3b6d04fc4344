"""Reports single fresh tokens whose behaviour logprobs differ from the trainer's.

The mean over a batch hides them: one wrong token among a thousand changes it by less than chance.
"""

from __future__ import annotations

from collections.abc import Iterator

from grpo_trainer.algo.logprob_comparison import TokenTable
from grpo_trainer.verify.causes import rounded_to_bfloat16
from grpo_trainer.verify.findings import CheckName, Finding

SINGLE_TOKEN_FACTOR = 20.0
"""A token whose |difference| exceeds the tolerance by this factor is reported. Healthy maxima are
far below it. Measured with SmolLM2-135M: 2e-5 in float32 (tolerance 2e-4), 0.4 in bfloat16
(tolerance 0.25). A token that was not sampled differs by several nats."""
BFLOAT16_STEP = 2.0**-8
"""Largest relative difference between a number and its rounding to bfloat16."""
_TOKENS = (
    "let the environment send the token ids of the server's response, and not encode text again"
)
_PRECISION = (
    "let the environment send inference_logprobs in float32, as the server returns them: rounding "
    "to bfloat16 explains these differences"
)


def single_tokens(env_id: int | None, fresh: TokenTable, tolerance: float) -> Iterator[Finding]:
    """Args:
    fresh: an environment's trained tokens that exactly the trainer's weights sampled
    tolerance: for the mean |difference|
    """
    limit = SINGLE_TOKEN_FACTOR * tolerance
    # Logprobs at a temperature below 1 are noisier, as in `Distance`.
    noise = fresh.diff.abs() * fresh.temperature.clamp(max=1.0)
    distant = fresh.where(noise > limit)
    if len(distant):
        yield Finding(
            CheckName.SINGLE_TOKENS,
            env_id,
            f"exactly the trainer's weights sampled {len(fresh)} trained tokens, but the behaviour "
            f"logprobs of {len(distant)} of them, in {len(distant.sequences())} completions, "
            f"differ from the trainer's by more than {limit:.2g}, by "
            f"{float(distant.diff.abs().max()):.2g} at most",
            _PRECISION if _is_rounding(distant) else _TOKENS,
        )


def _is_rounding(table: TokenTable) -> bool:
    is_near = table.diff.abs() <= BFLOAT16_STEP * table.logp.abs()
    return bool(
        (is_near & (rounded_to_bfloat16(table.behaviour_logp) == table.behaviour_logp)).all()
    )
