"""Why logged log-probabilities and the trainer's disagree: hypotheses, tried on the batch itself.

Each names what would make the two agree and how far they lie apart if it holds. The right one
leaves rounding noise. The report lists the numbers, what was tried and the likeliest cause.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from grpo_trainer.algo.logprob_comparison import MIN_TOKENS, TokenTable
from grpo_trainer.data.collate import Batch
from grpo_trainer.model.policy_protocol import CausalLM, device_of
from grpo_trainer.verify.alignment import MISMATCH

SAMPLE_TOKENS = 256
SAMPLE_SEQUENCES = 16

_SEARCH_RATIOS = tuple(1.25 ** (5.0**-k) for k in range(4))
"""Ratios of neighbouring temperatures in one search after the other, each around the best of the
one before; the last is 0.2 %."""
_SEARCH_WIDTH = 7
_OTHER_TEMPERATURE = 1.1
"""Ratio from which on two temperatures count as different."""
UNCHANGED = "No weight was changed by this step."
_EXPLAINS = 2.0
"""Factor by which the best assumption must reduce the difference to be called the cause."""


class Cause(StrEnum):
    """What to look at, by the hypothesis that holds."""

    LOGPROBS_LATE = (
        "inference_logprobs stand one position too late: look at where the environment puts the "
        "prompt's placeholders"
    )
    LOGPROBS_EARLY = (
        "inference_logprobs stand one position too early: look at where the environment puts the "
        "prompt's placeholders, and whether it cuts the first logprob off"
    )
    TEMPERATURE = (
        "the completions were sampled at another temperature than their group says (a group that "
        "says none means 1.0): let the environment send generation_params.temperature"
    )
    PROMPT_TRAINED = (
        "prompt tokens are trained on: look at the environment's masks, which are -100 at prompt "
        "positions"
    )
    STALE_WEIGHTS = (
        "the server does not serve the weights that the trainer holds: look for another process "
        "that writes them, and at how the server was started"
    )


@dataclass(frozen=True)
class Hypothesis:
    """`mean`: mean |difference| of the log-probabilities if it holds."""

    cause: Cause
    assumption: str
    mean: float


def subsample(table: TokenTable) -> TokenTable:
    """A part that is cheap to compute again: at most 256 tokens of at most 16 sequences."""
    few = table.where(
        torch.isin(table.sequence, torch.tensor(table.sequences()[:SAMPLE_SEQUENCES]))
    )
    return few.where(torch.arange(len(few)) < SAMPLE_TOKENS)


def shifted_logprobs(table: TokenTable) -> list[Hypothesis]:
    """Logprobs that belong to the neighbour's token. Args: table: N tokens."""
    follows = (table.sequence[1:] == table.sequence[:-1]) & (
        table.position[1:] == table.position[:-1] + 1
    )  # [N-1]
    if int(follows.sum()) < MIN_TOKENS:
        return []
    late = (table.logp[:-1] - table.behaviour_logp[1:])[follows].abs().mean()
    early = (table.logp[1:] - table.behaviour_logp[:-1])[follows].abs().mean()
    return [
        Hypothesis(Cause.LOGPROBS_LATE, "logprobs moved back by one position", float(late)),
        Hypothesis(Cause.LOGPROBS_EARLY, "logprobs moved forward by one position", float(early)),
    ]


def without_shared_prefix(table: TokenTable, batch: Batch) -> list[Hypothesis]:
    """Only tokens behind the beginning that all completions of a group share."""
    shared = torch.tensor([origin.shared_tokens for origin in batch.origins])
    own = table.where(table.position >= shared[table.sequence])
    if not MIN_TOKENS <= len(own) < len(table):
        return []
    assumption = "without the tokens that all completions of a group share"
    return [Hypothesis(Cause.PROMPT_TRAINED, assumption, own.mean_distance())]


@torch.no_grad()
def other_temperature(policy: CausalLM, table: TokenTable, batch: Batch) -> list[Hypothesis]:
    """The temperature that explains the logprobs best, where it is another than said."""
    if len(table) < MIN_TOKENS:
        return []
    logits, targets = _logits(policy, table, batch)  # [N, V], [N]
    logged = table.behaviour_logp.to(logits.device)

    def distance(temperature: float) -> float:
        logp = (logits / temperature).log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return float((logp - logged).abs().mean())

    said = best = float(table.temperature.median())
    for ratio in _SEARCH_RATIOS:
        steps = range(-_SEARCH_WIDTH, _SEARCH_WIDTH + 1)
        best = min((best * ratio**k for k in steps), key=distance)
    if abs(math.log(best / said)) < math.log(_OTHER_TEMPERATURE):
        return []
    assumption = f"sampled at temperature {best:.2f} instead of {said:g}"
    return [Hypothesis(Cause.TEMPERATURE, assumption, distance(best))]


def _logits(policy: CausalLM, table: TokenTable, batch: Batch) -> tuple[Tensor, Tensor]:
    """Those that predict the table's tokens, and these tokens: [N, V] float32, [N]."""
    device = device_of(policy)
    logits, targets = [], []
    for number in table.sequences():
        positions = table.position[table.sequence == number].to(device)
        ids = batch.tokens(number, int(positions.max()) + 1).to(device)
        answer = policy(input_ids=ids[:-1].unsqueeze(0), use_cache=False).logits[0]  # [T, V]
        logits.append(answer[positions - 1].float())
        targets.append(ids[positions])
    return torch.cat(logits), torch.cat(targets)


@dataclass(frozen=True)
class ServerAnswer:
    """`mean`: |server's - trainer's log-probability| of the same tokens, asked now; None where the
    server did not answer."""

    mean: float | None
    text: str


def mismatch_report(
    summary: str,
    sent: float,
    tried: Sequence[Hypothesis],
    tolerance: float,
    server: ServerAnswer | None = None,
) -> str:
    """What a rollout mismatch tells its reader: the numbers, what was tried, the likeliest cause.

    Args:
        summary: which tokens, and how far off they are
        sent: mean |difference| as sent
        tried: the same under other assumptions
        tolerance: of the data type
        server: None if it was not asked
    """
    best = sorted(tried, key=lambda hypothesis: hypothesis.mean)
    lines = [
        f"{MISMATCH} {summary}",
        "Mean |difference|:",
        f"  as sent: {sent:.2g}",
        *(f"  {hypothesis.assumption}: {hypothesis.mean:.2g}" for hypothesis in best),
    ]
    if server is not None:
        lines.append(f"  between server and trainer, asked now: {server.text}")
    if server is not None and (server.mean or 0.0) > tolerance:
        verdict = f"Likely cause: {Cause.STALE_WEIGHTS}."
    elif best and _EXPLAINS * best[0].mean < sent:
        verdict = f"Likely cause: {best[0].cause}."
    else:
        causes = "; ".join(f"({i}) {cause}" for i, cause in enumerate(Cause, start=1))
        verdict = f"None of these explains it. What to look at, in this order: {causes}."
    return "\n".join([*lines, f"{verdict} {UNCHANGED}"])
