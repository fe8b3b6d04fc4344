from __future__ import annotations

import pytest
import torch

from grpo_trainer.batch import Origin
from grpo_trainer.shared_beginnings import unlikely_groups
from grpo_trainer.token_table import Distance, TokenTable


def table(logp: list[list[float]]) -> TokenTable:
    """One row per sequence; its second token is the first that is trained on."""
    values = torch.tensor([value for row in logp for value in row])
    return TokenTable(
        logp=values,
        behaviour_logp=values,
        temperature=torch.ones_like(values),
        sequence=torch.tensor([i for i, row in enumerate(logp) for _ in row]),
        position=torch.tensor([1 + t for row in logp for t in range(len(row))]),
    )


def origins(siblings: int, shared_tokens: int, group: int = 0) -> list[Origin]:
    return [Origin(group, None, None, siblings, shared_tokens) for _ in range(siblings)]


@pytest.mark.parametrize(
    ("logp", "shared_tokens", "siblings", "unlikely"),
    [
        # (nats beyond 0.2) times (siblings - 1): 4.8 * 3 = 14.4 for each token
        ([-5.0] * 2, 9, 4, False),
        ([-5.0] * 3, 9, 4, True),
        ([-5.0] * 3, 3, 4, False),  # the third is beyond what they share
        ([-5.0] * 9, 1, 4, False),  # they share the prompt alone
        ([-5.0] * 99, 99, 1, False),  # nobody to share with
        ([-0.15] * 300, 400, 8, False),  # all but certain, and a little less so by now
        ([-1.2] * 4, 9, 64, False),  # 4 nats by 7 siblings, not by 63
        ([-1.2] * 5, 9, 64, True),
    ],
)
def test_chances_by_hand(
    logp: list[float], shared_tokens: int, siblings: int, unlikely: bool
) -> None:
    found = unlikely_groups(table([logp] * siblings), origins(siblings, shared_tokens))
    assert found == ({0} if unlikely else set())


def test_each_group_is_judged_by_its_own_beginning() -> None:
    """Both are as surprising; only the second is shared."""
    both = [*origins(2, shared_tokens=1, group=0), *origins(2, shared_tokens=9, group=1)]
    assert unlikely_groups(table([[-8.0] * 6] * 4), both) == {1}


@pytest.mark.parametrize(("temperature", "surely"), [(0.5, 0.04), (2.0, 0.08)])
def test_below_temperature_one_the_noise_of_logits_counts(
    temperature: float, surely: float
) -> None:
    """Dividing the logits by 0.5 doubles their rounding errors as well."""
    logp, index = torch.full((10,), -1.0), torch.zeros(10, dtype=torch.long)
    tokens = TokenTable(logp, logp - 0.08, torch.full((10,), temperature), index, index)
    distance = Distance.of(tokens)
    assert distance.surely == pytest.approx(surely, abs=1e-6)
    assert distance.mean == pytest.approx(0.08, abs=1e-6)
