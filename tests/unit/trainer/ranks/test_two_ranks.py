"""Two real processes compute what one computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.trainer.ranks.rank_rig import LOST, Case, learn, together

KL = {"kl_coef": 0.1}
LORA = {"mode": "lora_only", "lora_r": 4}
CASES = {
    case.name: case
    for case in (
        Case("uneven", tokens=22, options=KL, steps=3),
        Case("one-micro-batch", tokens=1000),
        Case("adapter", tokens=22, options=LORA | KL, steps=3),
        Case("fsdp", tokens=22, options={"fsdp": True, **KL}, steps=10),
        Case("fsdp-one-micro-batch", tokens=1000, options={"fsdp": True}),
    )
}


@pytest.fixture(scope="module")
def results(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ranks")
    together(list(CASES.values()), model, directory)
    return directory


def require_close(found: Any, expected: Any, tolerance: float) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_compute_the_step_of_one(name: str, model: str, results: Path) -> None:
    """Loss, metrics, tokens, gradients, and the weights and the optimizer's state after steps."""
    case = CASES[name]
    found, alone = torch.load(results / name), learn(case, model)
    assert (alone["micro_batches"] % 2, alone["micro_batches"] > 2) == (1, case.tokens < 1000)
    for key in ("loss_parts", "sums", "tokens", "norm"):
        require_close(found[key], alone[key], 1e-6)
    if "fsdp" not in name:  # there, rank 0 has a part of each
        assert any(bool(gradient.any()) for gradient in alone["gradients"])
        require_close(found["gradients"], alone["gradients"], 1e-6)
    require_close(found["weights"], alone["weights"], 1e-5)
    require_close(found["state"], alone["state"], 1e-5)
    assert found["state_bytes"] == alone["state_bytes"]
    assert found["overflowed"]


def test_a_rank_ends_with_an_error_if_rank_0_ends(results: Path) -> None:
    message = (results / LOST).read_text()
    assert message.startswith("rank 1 of 2, waiting for the next batch of rank 0: another")
