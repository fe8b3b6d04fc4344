"""Joins prompt and completion into the token, mask and logprob lists of a scored group.

prompt 5 6, completion 90 91 sampled with -0.4, -1.2
tokens              [ 5,    6,    90,   91 ]
masks               [-100, -100,  90,   91 ]
inference_logprobs  [ 1.0,  1.0, -0.4, -1.2]

`grpo_core.wire` explains the fields.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from grpo_core.clients.inference import Completion
from grpo_core.errors import GrpoError
from grpo_core.wire.fields import MASKED, PROMPT_LOGPROB

LOGPROB_SLACK = 1e-6
"""Rounding may report a probability of 1 as a logprob this far above 0."""


class MisalignedCompletion(GrpoError):
    """A completion's tokens and logprobs cannot be trained on. The message lists every problem."""


def align_group(
    prompt_ids: Sequence[int], completions: Sequence[Completion]
) -> dict[str, list[list[Any]]]:
    """The fields of a `ScoredGroup` that hold one list [T] per completion of the prompt.

    Raises:
        MisalignedCompletion: empty prompt or completion, lists of different lengths, or a
            logprob that is not a finite number of at most 0.
    """
    problems = [] if prompt_ids else ["the prompt has no tokens"]
    for index, completion in enumerate(completions):
        problems += [f"completion {index}: {problem}" for problem in _problems(completion)]
    if problems:
        raise MisalignedCompletion(
            "vllm-server: /generate sent an answer that cannot be trained on: "
            + "; ".join(problems)
        )
    prompt_length = len(prompt_ids)
    return {
        "tokens": [[*prompt_ids, *c.token_ids] for c in completions],
        "masks": [[MASKED] * prompt_length + c.token_ids for c in completions],
        "inference_logprobs": [[PROMPT_LOGPROB] * prompt_length + c.logprobs for c in completions],
    }


def _problems(completion: Completion) -> list[str]:
    problems = [] if completion.token_ids else ["no tokens"]
    if len(completion.logprobs) != len(completion.token_ids):
        problems.append(
            f"{len(completion.logprobs)} logprobs for {len(completion.token_ids)} tokens"
        )
    problems += [
        f"invalid logprob {logprob} at token {position}"
        for position, logprob in enumerate(completion.logprobs)
        if not (math.isfinite(logprob) and logprob <= LOGPROB_SLACK)
    ]
    return problems
