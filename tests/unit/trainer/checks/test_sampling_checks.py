"""Tokens sampled from known distributions: honest ones pass at any age, others are named.

Legend: N tokens, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from grpo_core.wire.policy_version import PolicyVersion
from grpo_trainer.checks.findings import CheckName
from grpo_trainer.checks.sampling import LOOK_EVERY_STEPS, RatioCheck, SamplingCheck
from grpo_trainer.data.collate import Batch
from grpo_trainer.model.logprobs import probability_above
from grpo_trainer.token_table import TokenTable
from tests.unit.trainer.groups import group, usable

V, SEQUENCES, LENGTH, STEPS = 40, 64, 5, 10
N = SEQUENCES * LENGTH
Change = Callable[[Tensor], Tensor]


def unchanged(values: Tensor) -> Tensor:
    return values


def top_p(logits: Tensor, limit: float = 0.8) -> Tensor:
    """Logits of the smallest set of tokens with this probability; -inf for all others."""
    ordered, order = logits.softmax(-1).sort(descending=True)
    is_out = (ordered.cumsum(-1) - ordered > limit).gather(-1, order.argsort(-1))
    return logits.masked_fill(is_out, -torch.inf)


class Sampler:
    """Args:
    drift: standard deviation of the change of the logits since the sampling
    sampling: changes the logits from which tokens are sampled
    logging: changes the logprobs of the whole distribution that are logged
    sharpness: standard deviation of the logits
    """

    def __init__(
        self,
        drift: float,
        sampling: Change = unchanged,
        logging: Change = unchanged,
        sharpness: float = 2.0,
    ) -> None:
        self.drift, self.sampling, self.logging = drift, sampling, logging
        self.sharpness = sharpness
        self.generator = torch.Generator().manual_seed(0)

    def table(self) -> TokenTable:
        old = self.sharpness * torch.randn(N, V, generator=self.generator)
        new = old + self.drift * torch.randn(N, V, generator=self.generator)
        chosen = torch.multinomial(self.sampling(old).softmax(-1), 1, generator=self.generator)
        logged, logp = (logits.log_softmax(-1).gather(-1, chosen)[:, 0] for logits in (old, new))
        number = torch.arange(N)
        return TokenTable(
            logp=logp,
            entropy=torch.zeros(N),
            above=probability_above(new, chosen[:, 0]),
            behaviour_logp=self.logging(logged),
            temperature=torch.ones(N),
            sequence=number // LENGTH,
            position=1 + number % LENGTH,
        )


@pytest.mark.parametrize("drift", [0.0, 0.3])
@pytest.mark.parametrize(
    ("logging", "place"),
    [
        (unchanged, None),
        (lambda logp: 0.8 * logp, "first last all"),
        (lambda logp: logp.where(torch.arange(N) % LENGTH > 0, logp - 0.5), "first all"),
        (lambda logp: logp.where(torch.arange(N) % LENGTH < LENGTH - 1, -0.01), "last all"),
    ],
)
def test_the_mean_ratio_shows_wrong_logprobs_at_any_age(
    drift: float, logging: Change, place: str | None
) -> None:
    check, sampler = RatioCheck(), Sampler(drift, logging=logging)
    found = {
        (finding.env_id, finding.reason.partition("(")[2].partition(" of each")[0])
        for _ in range(STEPS if place else 20 * STEPS)
        for finding in check.findings(sampler.table(), [3] * SEQUENCES)
    }
    assert found == {(3, name) for name in (place or "").split()}


def test_one_environment_among_others_is_named() -> None:
    check = RatioCheck()
    sampler = Sampler(0.1, logging=lambda logp: logp.where(torch.arange(N) >= N // 4, 0.7 * logp))
    env_ids = [1] * (SEQUENCES // 4) + [None] * (3 * SEQUENCES // 4)
    found = {one.env_id for _ in range(STEPS) for one in check.findings(sampler.table(), env_ids)}
    assert found == {1}


def findings(sampler: Sampler, steps: int) -> set[CheckName]:
    """Without a policy: only steps that compute nothing again."""
    batch = Batch([], usable(group())[:1] * SEQUENCES, range(SEQUENCES))
    check = SamplingCheck(policy=None, forward=None)  # type: ignore[arg-type]
    without_look = (step for step in range(10_000) if step % LOOK_EVERY_STEPS)
    return {
        finding.check
        for _, step in zip(range(steps), without_look, strict=False)
        for finding in check.findings(
            sampler.table(), torch.ones(N, dtype=torch.bool), batch, PolicyVersion(1, step)
        )
    }


@pytest.mark.parametrize("drift", [0.0, 0.3])
@pytest.mark.parametrize(
    "sampling", [top_p, lambda logits: top_p(logits, 0.9), lambda logits: logits / 0.6]
)
def test_a_missing_end_of_the_distribution_is_found_at_any_age(
    drift: float, sampling: Change
) -> None:
    """Every logprob is that of the whole distribution, so the mean ratio shows nothing."""
    assert findings(Sampler(drift, sampling), STEPS) == {CheckName.TRUNCATED_SAMPLING}


@pytest.mark.parametrize("drift", [0.0, 0.3])
@pytest.mark.parametrize("sharpness", [1.0, 10.0])
def test_honest_tokens_pass_also_of_a_nearly_certain_policy(drift: float, sharpness: float) -> None:
    assert findings(Sampler(drift, sharpness=sharpness), 20 * STEPS) == set()


def test_the_probability_above_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.2, 0.3], [0.5, 0.2, 0.3]]).log()
    assert probability_above(logits, torch.tensor([1, 0])).tolist() == pytest.approx([0.8, 0.0])
