"""Two real processes compute what one computes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.trainer.ranks.rank_rig import LOST, RANKS, Case, learn, together

KL = {"kl_coef": 0.1}
LORA = {"mode": "lora_only", "lora_r": 4}
FSDP = {"fsdp": True}
RECOMPUTED = {"gradient_checkpointing": True}
LAYERS = {"train_layer_indices": "1"}
QUICK = (
    Case("uneven", tokens=22, options=KL, steps=3),
    Case("one-micro-batch", tokens=1000),
    Case("adapter", tokens=22, options=LORA | KL, steps=3),
    Case("fsdp", tokens=22, options=FSDP | KL, steps=10),
    Case("fsdp-one-micro-batch", tokens=1000, options=FSDP),
    Case("fsdp-adapter", tokens=22, options=FSDP | LORA | KL | RECOMPUTED, steps=3),
    Case("fsdp-adafactor", tokens=22, options=FSDP | {"optimizer": "adafactor"}, steps=3),
)
ROUNDED = Case("fsdp-rounded", tokens=22, options=FSDP | {"master_dtype": "bfloat16"})
FULL = (
    Case("fsdp-8bit", tokens=22, options=FSDP | {"optimizer": "adamw_8bit"}, steps=3),
    Case("fsdp-adapter-8bit", 22, FSDP | LORA | {"optimizer": "adamw_8bit"}, steps=3),
    Case("fsdp-adapter-adafactor", 22, FSDP | LORA | {"optimizer": "adafactor"}, steps=3),
    Case("fsdp-layers", tokens=22, options=FSDP | LAYERS | RECOMPUTED, steps=3),
    Case("fsdp-layers-adafactor", 22, FSDP | LAYERS | {"optimizer": "adafactor"}, steps=3),
    Case("fsdp-recomputed", tokens=22, options=FSDP | KL | RECOMPUTED, steps=3),
    Case("fsdp-compiled", 22, FSDP | {"compile": True, "fused_head": "off"}, steps=3),
    Case("fsdp-adapter-compiled", 22, FSDP | LORA | {"compile": True, "fused_head": "off"}),
)
CASES = {case.name: case for case in (*QUICK, *FULL)}
OTHER_BLOCKS = 3e-4
"""If a rank's rows of a matrix are no multiple of 256 weights, its 8-bit moments have other scales
than those of one process. Per step, this moved weights by up to 4 % of the learning rate."""


@pytest.fixture(scope="module")
def results(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return computed((*QUICK, ROUNDED), model, tmp_path_factory)


@pytest.fixture(scope="module")
def more_results(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return computed(FULL, model, tmp_path_factory)


def computed(cases: Sequence[Case], model: str, factory: pytest.TempPathFactory) -> Path:
    directory = factory.mktemp("ranks")
    together([*cases], model, directory)
    return directory


def require_close(found: Any, expected: Any, tolerance: float) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_two_ranks_compute_the_step_of_one(case: Case, model: str, results: Path) -> None:
    require_equal(case, torch.load(results / case.name), learn(case, model))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of torch's compiler
@pytest.mark.parametrize("case", FULL, ids=lambda case: case.name)
def test_two_ranks_compute_every_step_of_one(case: Case, model: str, more_results: Path) -> None:
    require_equal(case, torch.load(more_results / case.name), learn(case, model))


def require_equal(case: Case, found: dict[str, Any], alone: dict[str, Any]) -> None:
    """Loss, metrics, tokens, gradients, and the weights and the optimizer's state after steps."""
    assert (alone["micro_batches"] % 2, alone["micro_batches"] > 2) == (1, case.tokens < 1000)
    for key in ("loss_parts", "sums", "tokens", "norm"):
        require_close(found[key], alone[key], 1e-6)
    if "fsdp" not in case.name:  # there, rank 0 has a part of each
        assert any(bool(gradient.any()) for gradient in alone["gradients"])
        require_close(found["gradients"], alone["gradients"], 1e-6)
    if case.name == "fsdp-8bit":
        require_close(found["weights"], alone["weights"], OTHER_BLOCKS)
    else:
        require_close(found["weights"], alone["weights"], 1e-5)
        require_close(found["state"], alone["state"], 1e-5)
    assert found["state_bytes"] == alone["state_bytes"]
    assert found["overflowed"]
    assert found["sampled"] == alone["sampled"]
    if "fsdp" in case.name:
        assert found["held"] < 0.51 * alone["held"]


def test_ranks_round_to_bfloat16_with_random_numbers_of_their_own(
    model: str, results: Path
) -> None:
    """So the weights of two ranks are those of one, or their neighbours."""
    found, alone = torch.load(results / ROUNDED.name), learn(ROUNDED, model)
    assert len({*found["noise"]}) == RANKS
    require_close(found["weights"], alone["weights"], 1e-2)


def test_a_rank_ends_with_an_error_if_rank_0_ends(results: Path) -> None:
    message = (results / LOST).read_text()
    assert message.startswith("rank 1 of 2, waiting for the next batch of rank 0: another")
