"""Faults between the server's answer and the trainer: what an environment, a relay or a proxy makes
of a sampled group. Each function returns the changed group; its receipts stay those of the server.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import torch

from grpo_core.wire.fields import MASKED, PROMPT_LOGPROB
from grpo_core.wire.receipt import RECEIPT
from grpo_core.wire.scored_group import ScoredGroup
from tests.silent_faults.exercise import TokenIds


def changed(group: ScoredGroup, **changes: Any) -> ScoredGroup:
    return ScoredGroup.model_validate(group.model_dump() | changes)


def prompt_length(group: ScoredGroup) -> int:
    return group.masks[0].index(next(mask for mask in group.masks[0] if mask != MASKED))


def with_logprobs(group: ScoredGroup, change: Callable[[list[float]], list[float]]) -> ScoredGroup:
    """Args: change: of the logprobs of one completion"""
    p = prompt_length(group)
    rows = [[*row[:p], *change(row[p:])] for row in group.inference_logprobs or []]
    return changed(group, inference_logprobs=rows)


def without_tokens(group: ScoredGroup, start: int, end: int) -> ScoredGroup:
    """Without the tokens from `start` to `end`, and all that belongs to them."""
    columns = {
        "tokens": group.tokens,
        "masks": group.masks,
        "inference_logprobs": group.inference_logprobs or [],
    }
    cut = {name: [row[:start] + row[end:] for row in rows] for name, rows in columns.items()}  # type: ignore[attr-defined]
    return changed(group, **cut)


def scored(group: ScoredGroup, scores: Sequence[float]) -> ScoredGroup:
    """The environment itself gives these scores, so the receipts contain them."""
    overrides = copy.deepcopy(group.overrides)
    for override, score in zip(overrides or [], scores, strict=False):
        if RECEIPT in override:
            override[RECEIPT]["score"] = score
    return changed(group, scores=[*scores], overrides=overrides)


def late(group: ScoredGroup, _: TokenIds) -> ScoredGroup:
    """The first sampled token gets a plausible logprob, every other token that of its left
    neighbour."""
    return with_logprobs(group, lambda row: [-0.5, *row[:-1]])


def scaled(group: ScoredGroup, _: TokenIds) -> ScoredGroup:
    return with_logprobs(group, lambda row: [0.8 * value for value in row])


def rounded(group: ScoredGroup, _: TokenIds) -> ScoredGroup:
    return with_logprobs(group, lambda row: torch.tensor(row).bfloat16().tolist())


def four_digits(group: ScoredGroup, _: TokenIds) -> ScoredGroup:
    return with_logprobs(group, lambda row: [round(value, 4) for value in row])


def prompt_trained(group: ScoredGroup, _: TokenIds) -> ScoredGroup:
    """From the seventh token on, with a plausible logprob."""
    p, rows = prompt_length(group), group.inference_logprobs or []
    return changed(
        group,
        masks=[[MASKED] * 6 + tokens[6:] for tokens in group.tokens],
        inference_logprobs=[[*row[:6], *[-0.5] * (p - 6), *row[p:]] for row in rows],
    )


def padded(group: ScoredGroup, ids: TokenIds) -> ScoredGroup:
    """To one length, with the padding in the masks."""
    longest = max(map(len, group.tokens)) + 1
    spare = [longest - len(tokens) for tokens in group.tokens]
    pairs = list(zip(group.tokens, group.masks, group.inference_logprobs or [], spare, strict=True))
    return changed(
        group,
        tokens=[tokens + [ids.pad] * n for tokens, _, _, n in pairs],
        masks=[masks + [ids.pad] * n for _, masks, _, n in pairs],
        inference_logprobs=[row + [-0.5] * n for _, _, row, n in pairs],
    )


def end_masked(group: ScoredGroup, ids: TokenIds) -> ScoredGroup:
    rows = zip(group.tokens, group.masks, strict=True)
    return changed(group, masks=[[*m[:-1], MASKED] if t[-1] == ids.end else m for t, m in rows])


def failed_as_zero(group: ScoredGroup, _: TokenIds) -> ScoredGroup:
    draw = random.Random(str(group.tokens))
    return scored(group, [0.0 if draw.random() < 0.3 else s for s in group.scores])


def broadcast(group: ScoredGroup, _: TokenIds) -> ScoredGroup:
    return scored(group, [fmean(group.scores)] * group.size)


def scores_moved(group: ScoredGroup, _: TokenIds) -> ScoredGroup:
    """Each completion has its neighbour's score."""
    return changed(group, scores=[*group.scores[1:], group.scores[0]])


def retokenised(group: ScoredGroup, ids: TokenIds) -> ScoredGroup:
    """A third of the completions begins with another token id than the sampled one."""
    p, draw = prompt_length(group), random.Random(str(group.tokens))
    tokens = [list(row) for row in group.tokens]
    for row in tokens:
        if draw.random() < 1 / 3:
            row[p] = ids.other(row[p])
    return changed(group, tokens=tokens, masks=[[MASKED] * p + row[p:] for row in tokens])


def one_retokenised(group: ScoredGroup, ids: TokenIds) -> ScoredGroup:
    """One token in the middle of the longest completion is another one."""
    tokens, masks = [list(row) for row in group.tokens], [list(row) for row in group.masks]
    longest = max(range(group.size), key=lambda i: len(tokens[i]))
    p = prompt_length(group)
    middle = p + (len(tokens[longest]) - p) // 2 - 1
    tokens[longest][middle] = masks[longest][middle] = ids.other(tokens[longest][middle])
    return changed(group, tokens=tokens, masks=masks)


def stripped(group: ScoredGroup, _: TokenIds) -> ScoredGroup:
    """Without the first token of each completion, as a template strips a thought."""
    p = prompt_length(group)
    return without_tokens(group, p, p + 1)


def another_prompt(group: ScoredGroup, ids: TokenIds) -> ScoredGroup:
    """The question's first summand is another one, as after a mistake in the order of items."""
    prompt = group.tokens[0][: prompt_length(group)]
    digit = [i for i, token in enumerate(prompt) if token in ids.digits][-2]
    tokens = [list(row) for row in group.tokens]
    for row in tokens:
        row[digit] = ids.other_digit(row[digit])
    return changed(group, tokens=tokens)


def begun_twice(group: ScoredGroup, _: TokenIds) -> ScoredGroup:
    """As after encoding a chat with its beginning by a tokenizer that adds a beginning."""
    return changed(
        group,
        tokens=[[row[0], *row] for row in group.tokens],
        masks=[[MASKED, *row] for row in group.masks],
        inference_logprobs=[[PROMPT_LOGPROB, *row] for row in group.inference_logprobs or []],
    )


def another_template(group: ScoredGroup, ids: TokenIds) -> ScoredGroup:
    """The newline after the question's role is a space."""
    prompt = group.tokens[0][: prompt_length(group)]
    newline = [i for i, token in enumerate(prompt) if token == ids.newline][-3]
    rows = [[*row[:newline], ids.space, *row[newline + 1 :]] for row in group.tokens]
    return changed(group, tokens=rows)


def without_system(group: ScoredGroup, _: TokenIds) -> ScoredGroup:
    """Without the first turn of the prompt. A turn begins with the prompt's first token."""
    prompt = group.tokens[0][: prompt_length(group)]
    return without_tokens(group, 0, prompt.index(prompt[0], 1))


def version_ahead(group: ScoredGroup, _: TokenIds) -> ScoredGroup:
    return _with_steps(group, lambda step: step + 1)


def version_of_start(group: ScoredGroup, _: TokenIds) -> ScoredGroup:
    return _with_steps(group, lambda _: 0)


def _with_steps(group: ScoredGroup, change: Callable[[int], int]) -> ScoredGroup:
    overrides = copy.deepcopy(group.group_overrides or {})
    overrides["policy_version"] = [
        [[epoch, change(step)] for epoch, step in pair] for pair in overrides["policy_version"]
    ]
    return changed(group, group_overrides=overrides)
