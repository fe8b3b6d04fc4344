"""Compares a group with its receipts: what is trained on must be what the server sampled.

Receipts hold for data of any age. Without them, only the numbers of the behaviour logprobs tell
(`grpo_trainer.checks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from grpo_core.errors import parsing
from grpo_core.wire.fields import MASKED
from grpo_core.wire.receipt import (
    RECEIPT,
    CompletionReceipt,
    RolloutReceipt,
    Values,
    count_of,
    distribution,
    first_changed,
    packed_ids,
    packed_logprobs,
)
from grpo_core.wire.scored_group import OWN_LOGPROBS, RolloutFacts, ScoredGroup
from grpo_trainer.errors import RolloutMismatch

_CAUSE = (
    "The values were changed between the server's answer and the trainer: by a relay, a proxy or "
    "the environment. Let each of them pass on token ids, logprobs, versions and scores as they "
    "are. What changes them on purpose must drop rollout_receipt from overrides. No weight was "
    "changed by this batch."
)


def check_receipts(index: int, group: ScoredGroup) -> None:
    """Does nothing for sequences without a receipt. Args: index: the group's place in the batch

    Raises:
        RolloutMismatch: names the first sequence that differs from its receipt, each field in which
            it does, and the place of the first difference.
    """
    where = f"group {index} of the batch (env_id {group.env_id})"
    carried = {i: o[RECEIPT] for i, o in enumerate(group.overrides or ()) if RECEIPT in o}
    versions = RolloutFacts.of(group).policy_version if carried else []
    different: dict[int, list[str]] = {}
    for i, value in carried.items():
        with parsing(f"{where}: the {RECEIPT} of sequence {i} is invalid", RolloutMismatch):
            receipt = RolloutReceipt.model_validate(value)
        stated = versions[i] if i < len(versions) else None
        if found := [*_of_tokens(group, i, receipt), *_of_facts(group.scores[i], stated, receipt)]:
            different[i] = found
    if different:
        first, found = next(iter(different.items()))
        raise RolloutMismatch(
            f"{where}: {len(different)} of {group.size} sequences are not what the server sampled "
            f"and the environment scored. Sequence {first}: {'; '.join(found)}. {_CAUSE}"
        )


def _of_facts(score: float, stated: Any, receipt: RolloutReceipt) -> Iterator[str]:
    """Args: stated: the versions, as they arrived"""
    completions = receipt.completions
    sent = completions[0].versions[0], completions[-1].versions[1]
    if stated != sent:
        arrived = "no version" if stated is None else " to ".join(map(str, stated))
        yield f"policy_version: sampled by {sent[0]} to {sent[1]}, and {arrived} arrived"
    if receipt.score not in (None, score):
        yield f"score: the environment gave {receipt.score}, and {score} arrived"


def _of_tokens(group: ScoredGroup, i: int, receipt: RolloutReceipt) -> Iterator[str]:
    found: list[str] = []
    unsampled = [*group.masks[i]]
    for completion in receipt.completions:
        start = count_of(completion.prompt)
        end = min(start + count_of(completion.completion), len(unsampled))
        unsampled[start:end] = [MASKED] * (end - start)
        # Later completions contain the difference of an earlier one in their prompts.
        found = found or [*_of_completion(group, i, completion, start, end)]
    yield from found
    trained = next((t for t, mask in enumerate(unsampled) if mask != MASKED), None)
    if trained is not None and not found:
        yield f"masks: token {trained} is trained on, but the server did not sample it"


def _of_completion(
    group: ScoredGroup, i: int, completion: CompletionReceipt, start: int, end: int
) -> Iterator[str]:
    """Args: start, end: of the completion in the sequence"""
    tokens = group.tokens[i]
    of_prompt = packed_ids(tokens[:start])
    yield from _of_values("tokens of the prompt", of_prompt, completion.prompt, 0)
    ids = packed_ids(tokens[start:end])
    yield from _of_values("tokens of the completion", ids, completion.completion, start)
    if group.inference_logprobs and not (group.group_overrides or {}).get(OWN_LOGPROBS):
        logprobs = packed_logprobs(group.inference_logprobs[i][start:end])
        yield from _of_values("inference_logprobs", logprobs, completion.logprobs, start)
    stated = _stated_distribution(group, i)
    for name in {**completion.sampling, **stated}:
        sent, arrived = completion.sampling.get(name), stated.get(name)
        if sent != arrived:
            yield f"{name}: sampled with {sent}, and the group states {arrived}"


def _of_values(field: str, values: Values, digest: bytes, start: int) -> Iterator[str]:
    """Args: start: place of the first value in the sequence"""
    changed = first_changed(values, digest)
    if changed is None:
        return
    count, first, last = count_of(digest), changed[0], changed[-1]
    place = f"{first + start}" if first == last else f"between {first + start} and {last + start}"
    shown = f", which arrived as {values[first]:.9g}" if first == last < len(values) else ""
    number = "" if len(values) == count else f" ({len(values)} of {count} values)"
    yield f"{field}: the first difference is at token {place}{shown}{number}"


def _stated_distribution(group: ScoredGroup, i: int) -> dict[str, float | bool]:
    overrides = group.overrides or []
    stated = {
        name: value
        for place in (group.group_overrides, group.generation_params, overrides[i])
        for name, value in (place or {}).items()
        if value is not None
    }
    return distribution(stated.get("temperature", 1.0), stated)
