"""Finds why behaviour logprobs and trainer logprobs differ, by testing known causes on the batch.

Each hypothesis computes the difference that would remain if it were true. The right one leaves only
rounding noise. The report lists the numbers and the likeliest cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_trainer.checks.served_weights import MISMATCH
from grpo_trainer.data.collate import Batch
from grpo_trainer.data.cuts import by_length
from grpo_trainer.model.adapter import without_dropout
from grpo_trainer.model.policy import CausalLM, device_of, uncompiled
from grpo_trainer.token_table import MIN_TOKENS, Distance, TokenTable, mean_distance

_SEARCH_RATIOS = tuple(1.25 ** (5.0**-k) for k in range(4))
"""Ratios of neighbouring temperatures in four successive searches. Each search starts at the best
temperature of the previous one; the last ratio is 0.2 %."""
_SEARCH_WIDTH = 7
_OTHER_TEMPERATURE = 1.1
"""Minimum ratio of two temperatures that count as different."""
UNCHANGED = "No weight was changed by this step."
_EXPLAINS = 4.0
"""The best hypothesis is reported as the cause if it reduces the difference by this factor."""
_SMALL_MOVEMENT, _LARGEST_MOVEMENT = 0.5, 4.0
"""A few updates change the logprobs by less, in nats: on average, and at most. Other tokens change
them by more. So does most often another prompt, but not one that differs in a token of the chat
template alone."""


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
        "the completions were not sampled at the temperature that their group states (1.0 if it "
        "states none), or their logprobs are those of another one: let the environment send "
        "generation_params.temperature, and no raw logprobs, which are those of temperature 1"
    )
    SCALED = (
        "inference_logprobs are multiplied by a constant: let the environment send natural "
        "logarithms, as the server returns them"
    )
    ROUNDED = "inference_logprobs are rounded to bfloat16: let the environment send them in float32"
    PROMPT_TRAINED = "prompt tokens are trained on: check the masks, -100 at prompt positions"
    TRAINING_PASS = (
        "the trainer's training pass computes other logprobs than a plain forward pass with the "
        "same weights: check that dropout is off, then pass --packing off and --fused-head off"
    )
    STALE_WEIGHTS = (
        "the server does not serve the trainer's weights: check whether another process writes "
        "weights, and how the server was started"
    )
    VERSION = (
        "earlier weights sampled the completions than the policy version that they state: let the "
        "environment send the version of the server's response"
    )
    OTHER_TOKENS = (
        "the tokens or the prompt are not those of the server's response: let the environment send "
        "the response's token ids, and not encode text again"
    )


@dataclass(frozen=True)
class Hypothesis:
    """A possible cause. `mean`: the mean |difference| of the logprobs if it is true."""

    cause: Cause
    assumption: str
    mean: float


def all_hypotheses(policy: CausalLM, table: TokenTable, batch: Batch) -> Iterator[Hypothesis]:
    """What may explain the differences of N tokens of `batch`, sampled by the policy's weights."""
    yield from shifted_logprobs(table)
    ours, logged = table.logp, table.behaviour_logp
    # For example 1.44, of binary logarithms. A factor far from 1 is no unit, but of nearly constant
    # logprobs.
    factor = float(ours @ logged / ours.square().sum().clamp_min(1e-12))
    if 0.1 < factor < 10:
        distance = mean_distance(ours, logged / factor)
        yield Hypothesis(Cause.SCALED, f"logprobs divided by {factor:.2f}", distance)
    if torch.equal(rounded_to_bfloat16(logged), logged):
        distance = mean_distance(rounded_to_bfloat16(ours), logged)
        yield Hypothesis(Cause.ROUNDED, "the trainer's logprobs rounded to bfloat16", distance)
    shared = torch.tensor([sequence.shared_tokens for sequence in batch.sequences])
    own = table.where(table.position >= shared[table.sequence])
    if MIN_TOKENS <= len(own) < len(table):
        assumption = "without the tokens that all completions of a group share"
        yield Hypothesis(Cause.PROMPT_TRAINED, assumption, own.mean_distance())
    yield from recomputed(policy, table, batch)


def shifted_logprobs(table: TokenTable) -> Iterator[Hypothesis]:
    """That logprobs belong to a neighbouring token. Args: table: N tokens"""
    follows = (table.sequence[1:] == table.sequence[:-1]) & (
        table.position[1:] == table.position[:-1] + 1
    )  # [N-1]
    if int(follows.sum()) < MIN_TOKENS:
        return
    ours, logged = table.logp, table.behaviour_logp
    late = mean_distance(ours[:-1][follows], logged[1:][follows])
    early = mean_distance(ours[1:][follows], logged[:-1][follows])
    yield Hypothesis(Cause.LOGPROBS_LATE, "logprobs moved back by one position", late)
    yield Hypothesis(Cause.LOGPROBS_EARLY, "logprobs moved forward by one position", early)


def rounded_to_bfloat16(logp: Tensor) -> Tensor:
    """Of 65,536 values in float32, this leaves one unchanged."""
    return logp.bfloat16().float()


def recomputed(policy: CausalLM, table: TokenTable, batch: Batch) -> Iterator[Hypothesis]:
    """What needs another forward pass: that the training pass is wrong, and another temperature, if
    the best-fitting one differs from the stated one."""
    if len(table) < MIN_TOKENS:
        return
    sequences = tokens_of(table, batch)
    logits = logits_of(policy, sequences)  # [N, V]
    ids = torch.cat([tokens[trained] for tokens, trained in sequences])
    columns = (ids, table.behaviour_logp, table.temperature)
    targets, logged, stated = (column.to(logits.device) for column in columns)

    def distance(temperature: Tensor) -> float:
        scaled = logits / temperature.unsqueeze(-1)
        logp = scaled.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return mean_distance(logp, logged)

    again = "computed again, with a plain forward pass without dropout"
    yield Hypothesis(Cause.TRAINING_PASS, again, distance(stated))
    usual = float(stated.median())
    best = _best_temperature(usual, lambda t: distance(torch.full_like(stated, t)))
    if abs(math.log(best / usual)) >= math.log(_OTHER_TEMPERATURE):
        assumption = f"sampled at temperature {best:.2f} instead of {usual:g}"
        at_best = distance(torch.full_like(stated, best))
        yield Hypothesis(Cause.TEMPERATURE, assumption, at_best)


def _best_temperature(stated: float, distance: Callable[[float], float]) -> float:
    best = stated
    for ratio in _SEARCH_RATIOS:
        steps = range(-_SEARCH_WIDTH, _SEARCH_WIDTH + 1)
        best = min((best * ratio**k for k in steps), key=distance)
    return best


def mismatch_report(
    summary: str,
    found: Distance,
    sent: float,
    tried: Sequence[Hypothesis],
    tolerance: float,
    server: float | str = "",
) -> str:
    """The error message of a rollout mismatch: the numbers, the hypotheses and the likeliest cause.

    Args:
        summary: which tokens differ, and by how much
        found: by how much all tokens differ
        sent: mean |difference| of the logprobs as sent, of a sample
        tried: the same under each hypothesis
        tolerance: for the data type
        server: mean |server's - trainer's logprob| of some of the tokens, measured now; or why the
            server did not answer; "" if it was not asked
    """
    best = sorted(tried, key=lambda hypothesis: hypothesis.mean)
    lines = [
        f"{MISMATCH} {summary}",
        "Mean |difference|:",
        f"  as sent: {sent:.2g}",
        *(f"  {hypothesis.assumption}: {hypothesis.mean:.2g}" for hypothesis in best),
    ]
    if server != "":
        told = f"{server:.2g}" if isinstance(server, float) else server
        lines.append(f"  between server and trainer, measured now: {told}")
    if isinstance(server, float) and server > tolerance:
        verdict = f"Likely cause: {Cause.STALE_WEIGHTS}."
    elif best and _EXPLAINS * best[0].mean < sent:
        verdict = f"Likely cause: {best[0].cause}."
    elif not isinstance(server, float):
        causes = "; ".join(f"({i}) {cause}" for i, cause in enumerate(Cause, start=1))
        verdict = f"None of these assumptions explains the difference. Check in order: {causes}."
    # Both sides agree on these tokens now, so the difference is in what the group states.
    elif found.mean < _SMALL_MOVEMENT and found.max < _LARGEST_MOVEMENT:
        verdict = f"Likely cause: {Cause.VERSION}. If the versions are right: {Cause.OTHER_TOKENS}."
    else:
        verdict = f"Likely cause: {Cause.OTHER_TOKENS}."
    return "\n".join([*lines, f"{verdict} {UNCHANGED}"])


SAMPLE_SEQUENCES, SAMPLE_TOKENS = 64, 16
"""Sequences of a sample, and tokens at each end of a sequence."""
SAMPLE_INPUTS = 2048
"""Tokens of the sequences of a sample, up to the last token that is computed again."""
PASS_TOKENS = 1024
"""Number of tokens in one forward pass; a longer sequence has one of its own."""


SequenceTokens = list[tuple[Tensor, Tensor]]
"""Of each sequence the tokens up to the last trained one, and the positions of those that count."""


def subsample(table: TokenTable) -> TokenTable:
    """A sample that is cheap to compute again: the first and the last tokens of at most 64
    sequences, spread over the batch."""
    sequences = table.sequences()
    chosen = sequences[:: max(1, len(sequences) // SAMPLE_SEQUENCES)][:SAMPLE_SEQUENCES]
    rows = [table.where(table.sequence == number) for number in chosen]
    ends = accumulate(int(row.position.max()) for row in rows)
    affordable = max(1, sum(total <= SAMPLE_INPUTS for total in ends))
    keep = torch.zeros(len(table), dtype=torch.bool)
    for number in chosen[:affordable]:
        places = (table.sequence == number).nonzero()[:, 0]
        keep[places[:SAMPLE_TOKENS]] = keep[places[-SAMPLE_TOKENS:]] = True
    return table.where(keep)


@torch.no_grad()
def logits_of(policy: CausalLM, sequences: SequenceTokens) -> Tensor:
    """[N, V] float32, the logits that predict the tokens that count."""
    device = device_of(policy)
    logits: dict[int, Tensor] = {}  # by index of the sequence
    with without_dropout(policy), uncompiled():
        for part in by_length([tokens[:-1].tolist() for tokens, _ in sequences], PASS_TOKENS):
            rows = pad_sequence([sequences[i][0][:-1] for i in part], batch_first=True)
            answers = policy(input_ids=rows.to(device), use_cache=False).logits  # [B, T, V]
            for i, answer in zip(part, answers, strict=True):
                logits[i] = answer[sequences[i][1].to(device) - 1].float()
    return torch.cat([logits[i] for i in range(len(sequences))])


def tokens_of(table: TokenTable, batch: Batch) -> SequenceTokens:
    """Those of the table count."""
    found = []
    for number in table.sequences():
        trained = table.position[table.sequence == number]
        tokens = batch.sequences[number].tokens[: int(trained.max()) + 1]
        found.append((torch.tensor(tokens), trained))
    return found
