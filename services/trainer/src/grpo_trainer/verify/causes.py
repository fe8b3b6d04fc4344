"""Finds why behaviour logprobs and trainer logprobs differ, by testing known causes on the batch.

Each hypothesis computes the difference that would remain if it were true. The right one leaves only
rounding noise. The report lists the numbers and the likeliest cause.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_trainer.algo.logprob_comparison import MIN_TOKENS, TokenTable
from grpo_trainer.data.collate import Batch
from grpo_trainer.data.micro_batches import by_length
from grpo_trainer.model.policy_protocol import CausalLM, device_of
from grpo_trainer.verify.alignment import MISMATCH

SAMPLE_TOKENS = 256
SAMPLE_SEQUENCES = 16
PASS_TOKENS = 1024
"""Number of tokens in one forward pass; a longer sequence has one of its own."""

_SEARCH_RATIOS = tuple(1.25 ** (5.0**-k) for k in range(4))
"""Ratios of neighbouring temperatures in four successive searches. Each search starts at the best
temperature of the previous one; the last ratio is 0.2 %."""
_SEARCH_WIDTH = 7
_OTHER_TEMPERATURE = 1.1
"""Minimum ratio of two temperatures that count as different."""
UNCHANGED = "No weight was changed by this step."
_EXPLAINS = 2.0
"""The best hypothesis is reported as the cause if it reduces the difference by this factor."""


class Cause(StrEnum):
    """The likely cause and what to do about it, for each hypothesis."""

    LOGPROBS_LATE = (
        "inference_logprobs are one position too late: check where the environment inserts the "
        "prompt's placeholders"
    )
    LOGPROBS_EARLY = (
        "inference_logprobs are one position too early: check where the environment inserts the "
        "prompt's placeholders, and whether the environment drops the first logprob"
    )
    TEMPERATURE = (
        "the completions were not sampled at the temperature that their group states (1.0 if the "
        "group states no temperature): let the environment send generation_params.temperature"
    )
    PROMPT_TRAINED = (
        "prompt tokens are trained on: check the environment's masks, which must be -100 at prompt "
        "positions"
    )
    STALE_WEIGHTS = (
        "the server does not serve the trainer's weights: check whether another process writes "
        "weights, and how the server was started"
    )


@dataclass(frozen=True)
class Hypothesis:
    """A possible cause. `mean`: the mean |difference| of the logprobs if it is true."""

    cause: Cause
    assumption: str
    mean: float


def subsample(table: TokenTable) -> TokenTable:
    """A sample that is cheap to compute again: at most 256 tokens of at most 16 sequences."""
    few = table.where(
        torch.isin(table.sequence, torch.tensor(table.sequences()[:SAMPLE_SEQUENCES]))
    )
    return few.where(torch.arange(len(few)) < SAMPLE_TOKENS)


def shifted_logprobs(table: TokenTable) -> list[Hypothesis]:
    """The hypotheses that logprobs belong to a neighbouring token. Args: table: N tokens."""
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
    """The hypothesis that the common beginning of a group's completions is its prompt."""
    shared = torch.tensor([origin.shared_tokens for origin in batch.origins])
    own = table.where(table.position >= shared[table.sequence])
    if not MIN_TOKENS <= len(own) < len(table):
        return []
    assumption = "without the tokens that all completions of a group share"
    return [Hypothesis(Cause.PROMPT_TRAINED, assumption, own.mean_distance())]


@torch.no_grad()
def other_temperature(policy: CausalLM, table: TokenTable, batch: Batch) -> list[Hypothesis]:
    """The hypothesis of another temperature, if the best-fitting one differs from the
    stated one."""
    if len(table) < MIN_TOKENS:
        return []
    logits, targets = _logits(policy, table, batch)  # [N, V], [N]
    logged = table.behaviour_logp.to(logits.device)

    def distance(temperature: float) -> float:
        logp = (logits / temperature).log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return float((logp - logged).abs().mean())

    stated = best = float(table.temperature.median())
    for ratio in _SEARCH_RATIOS:
        steps = range(-_SEARCH_WIDTH, _SEARCH_WIDTH + 1)
        best = min((best * ratio**k for k in steps), key=distance)
    if abs(math.log(best / stated)) < math.log(_OTHER_TEMPERATURE):
        return []
    assumption = f"sampled at temperature {best:.2f} instead of {stated:g}"
    return [Hypothesis(Cause.TEMPERATURE, assumption, distance(best))]


def _logits(policy: CausalLM, table: TokenTable, batch: Batch) -> tuple[Tensor, Tensor]:
    """The logits that predict the table's tokens, and these tokens: [N, V] float32, [N]."""
    device = device_of(policy)
    numbers = table.sequences()
    positions = [table.position[table.sequence == number] for number in numbers]
    tokens = [
        batch.tokens(number, int(trained.max()) + 1)
        for number, trained in zip(numbers, positions, strict=True)
    ]
    logits: dict[int, Tensor] = {}  # by index of the sequence
    for part in by_length([ids[:-1].tolist() for ids in tokens], PASS_TOKENS):
        rows = pad_sequence([tokens[i][:-1] for i in part], batch_first=True).to(device)
        answers = policy(input_ids=rows, use_cache=False).logits  # [B, T, V]
        for i, answer in zip(part, answers, strict=True):
            logits[i] = answer[positions[i].to(device) - 1].float()
    targets = [ids[trained] for ids, trained in zip(tokens, positions, strict=True)]
    return torch.cat([logits[i] for i in range(len(numbers))]), torch.cat(targets).to(device)


@dataclass(frozen=True)
class ServerAnswer:
    """`mean`: |server's - trainer's logprob| of the same tokens, measured now; None if the server
    did not answer."""

    mean: float | None
    text: str


def mismatch_report(
    summary: str,
    sent: float,
    tried: Sequence[Hypothesis],
    tolerance: float,
    server: ServerAnswer | None = None,
) -> str:
    """The error message of a rollout mismatch: the numbers, the hypotheses and the likeliest cause.

    Args:
        summary: which tokens differ, and by how much
        sent: mean |difference| of the logprobs as sent
        tried: the same under each hypothesis
        tolerance: for the data type
        server: the server's answer; None if it was not requested
    """
    best = sorted(tried, key=lambda hypothesis: hypothesis.mean)
    lines = [
        f"{MISMATCH} {summary}",
        "Mean |difference|:",
        f"  as sent: {sent:.2g}",
        *(f"  {hypothesis.assumption}: {hypothesis.mean:.2g}" for hypothesis in best),
    ]
    if server is not None:
        lines.append(f"  between server and trainer, measured now: {server.text}")
    if server is not None and (server.mean or 0.0) > tolerance:
        verdict = f"Likely cause: {Cause.STALE_WEIGHTS}."
    elif best and _EXPLAINS * best[0].mean < sent:
        verdict = f"Likely cause: {best[0].cause}."
    else:
        causes = "; ".join(f"({i}) {cause}" for i, cause in enumerate(Cause, start=1))
        verdict = (
            f"None of these assumptions explains the difference. Check in this order: {causes}."
        )
    return "\n".join([*lines, f"{verdict} {UNCHANGED}"])
