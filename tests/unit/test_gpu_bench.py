"""The GPU benchmark's arithmetic and its lists of shapes and options. It measures on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu_bench import counts, report
from benchmarks.gpu_bench.settings import PARTS, TrainWork
from benchmarks.gpu_bench.shapes import SHAPE_NAMES, SHAPES

TINY = SHAPES["tiny"]
BFLOAT16 = 2


def test_weights_flops_and_bytes_of_the_tiny_shape_by_hand() -> None:
    # q and o 128 x 128, k and v 128 x 64, three of 128 x 512, in two layers; the head 128 x 512
    assert TINY.matmul_parameters == 2 * (49_152 + 196_608) + 65_536
    # biases 128 + 64 + 64 and norms 2 x 128 per layer, the last norm
    assert TINY.parameters == TINY.matmul_parameters + 2 * (256 + 256) + 128
    attention = 12 * 2 * 128 * (1 + 2 + 3 + 1 + 2)  # each token attends to itself and those before
    assert counts.train_flops(TINY, [3, 2]) == 6 * TINY.matmul_parameters * 5 + attention
    keys_and_values = 2 * 2 * 64 * BFLOAT16  # of one token in two layers
    read = TINY.matmul_parameters * BFLOAT16 + 8 * 100 * keys_and_values
    assert counts.decode_step_bytes(TINY, 8, 100, BFLOAT16) == read


def test_the_results_list_every_size_and_part() -> None:
    text = (Path(__file__).parents[2] / "benchmarks/RESULTS.md").read_text()
    of_gpu = text.split("\n## GPU\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.split("|")[1:3] for line in of_gpu.splitlines() if "|" in line]
    named = {(size.strip(), part.strip()) for size, part in rows}
    assert {(size, part) for size in report.STATUS_SIZES for part in PARTS} <= named


@pytest.mark.full
def test_shapes_and_random_weights_are_those_of_the_models(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.gpu_bench.random_adapter import write_random_adapter
    from benchmarks.gpu_bench.random_model import make_random_model, model_config
    from grpo_core.weight_files import WeightKind, require_complete, require_rank

    for size in SHAPE_NAMES:
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(model_config(SHAPES[size], torch.bfloat16))
        assert sum(p.numel() for p in built.parameters()) == SHAPES[size].parameters
    directory = make_random_model("tiny", tmp_path / "model", torch.bfloat16)
    assert AutoModelForCausalLM.from_pretrained(directory).dtype == torch.bfloat16
    adapter = write_random_adapter(TINY, 16, tmp_path / "adapter", seed=0)
    require_complete(WeightKind.ADAPTER, adapter)
    require_rank(adapter, 16)


@pytest.mark.full
def test_training_work_has_the_lengths_and_options_that_are_reported() -> None:
    from benchmarks.gpu_bench.train_batch import random_batch, trained_lengths
    from benchmarks.gpu_bench.train_variants import ADAMW, forward_variants, optimizer_variants
    from benchmarks.gpu_bench.trainee import settings_with

    batch = random_batch(TINY, TrainWork(4, 16, 64, micro_batch=2, steps=1, min_steps=1), seed=0)
    assert sorted(trained_lengths(batch)) == [15, 31, 47, 63]
    for variant in [*forward_variants(ADAMW), *optimizer_variants(ADAMW)]:
        settings_with(variant.optimizer)
