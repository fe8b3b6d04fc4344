"""The GPU benchmark's arithmetic, records and report. It measures only on a GPU."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from benchmarks.gpu_bench import counts, report
from benchmarks.gpu_bench.budget import Budget
from benchmarks.gpu_bench.completion_log import CompletionLog
from benchmarks.gpu_bench.figures import (
    Figure,
    Goal,
    Limit,
    NotRun,
    Recorder,
    RunFacts,
    read_records,
)
from benchmarks.gpu_bench.render import runs_in
from benchmarks.gpu_bench.settings import PARTS, TrainWork
from benchmarks.gpu_bench.shapes import SHAPE_NAMES, SHAPES, ShapeName
from benchmarks.gpu_bench.training_memory import bytes_per_weight, step_bytes_per_weight

TINY = SHAPES["tiny"]
BFLOAT16 = 2
FACTS = RunFacts(
    size="0.5b",
    on_gpu=True,
    date="2026-01-02 03:04 UTC",
    commit="abc1234",
    command="python -m benchmarks.gpu --size 0.5b",
    measured_on=("a GPU", "versions"),
)
FAILED = NotRun(part="train", name="", reason="failed")


def figure(part: str = "decode", name: str = "speed", value: float = 97.0) -> Figure:
    return Figure.of(part, name, "tokens/s", [value - 1, value, value + 2])  # type: ignore[arg-type]


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


@pytest.mark.parametrize(
    ("size", "parameters", "tokens_per_s"),
    [("0.5b", 494_032_768, 292e3), ("1.5b", 1_543_714_304, 116e3), ("7b", 7_615_616_512, 41e3)],
)
def test_shapes_of_qwen_and_decode_limits_of_an_h200(
    size: ShapeName, parameters: int, tokens_per_s: float
) -> None:
    """256 sequences with 1,024 tokens each; 4 % for embeddings, which those numbers count."""
    assert SHAPES[size].parameters == parameters
    limit = counts.decode_limit(SHAPES[size], 256, 1024, BFLOAT16, counts.BANDWIDTH_H200)
    assert limit == pytest.approx(tokens_per_s, rel=0.04)


def test_bytes_of_a_training_step_by_hand() -> None:
    kept = bytes_per_weight({"optimizer": "adamw_8bit"}, micro_batches=1, number_bytes=BFLOAT16)
    assert (kept.weights, kept.masters, kept.gradients) == (2, 4, 2)
    plain = bytes_per_weight({}, micro_batches=1, number_bytes=BFLOAT16)
    # gradient 2, master and moments 2 x 12, staged 2, copied 2 + 2
    assert step_bytes_per_weight(plain, BFLOAT16) == 32


@given(st.lists(st.floats(0, 1e6), min_size=1), st.integers(1, 100))
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(
    values: list[float], percent: int
) -> None:
    found = counts.percentile(values, percent)
    assert found in values
    assert 100 * sum(value <= found for value in values) >= percent * len(values)
    assert 100 * sum(value < found for value in values) < percent * len(values)


def test_time_that_a_part_leaves_is_shared_by_the_parts_to_come() -> None:
    now = [0.0]
    budget = Budget(480.0, clock=lambda: now[0])
    assert budget.deadline(PARTS).left_s == pytest.approx(200.0)
    now[0] = 20.0
    assert budget.deadline(["memory", "publish"]).left_s == pytest.approx(460.0 / 4)
    now[0] = 500.0
    assert budget.deadline(["train"]).passed


def test_rates_count_requests_that_end_in_the_windows() -> None:
    log = CompletionLog()
    for end, tokens in ((1.0, 10), (2.0, 20), (3.0, 30), (4.0, 40)):
        log.add(end, tokens)
    assert log.rate([(1.0, 2.0), (3.5, 4.5)]) == 25.0


# --- records and RESULTS.md -----------------------------------------------------------------------


def test_records_come_back_from_the_file_and_are_printed(tmp_path: Path) -> None:
    out, path = io.StringIO(), tmp_path / "new" / "figures.jsonl"
    recorder = Recorder(path, out)
    missed = {"limit": Limit(value=200.0, what="memory"), "goal": Goal(kind="at least", bound=97.5)}
    for record in (FACTS, figure().model_copy(update=missed), FAILED):
        recorder.add(record)
    lines = path.read_text().splitlines()
    assert read_records(lines) == recorder.records
    assert [len(run) for run in runs_in([*lines, *lines[:2]])] == [3, 2]
    assert out.getvalue().splitlines()[-2:] == [
        "decode: speed: 97.0 tokens/s (96.0 to 99.0, n = 3); 0.485 x the limit (memory); "
        "goal at least 97.5: **missed**",
        "train: all of it: not run: failed",
    ]
    with pytest.raises(ValidationError):
        read_records([json.dumps({"record": "figure", "name": "x"})])


def section(text: str, heading: str) -> str:
    return text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def test_a_new_measurement_replaces_its_table_and_leaves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    path.write_text("# Results\n\n## run-api\n\nkept\n")
    report.write_results(path, [FACTS, figure("decode", value=50.0), figure("swap", value=5.0)])
    again = FACTS.model_copy(update={"date": "2026-02-03 00:00 UTC"})
    left_out = NotRun(part="decode", name="none", reason="the time\nwas up")
    refined = [figure("decode", value=1.0), figure("decode", value=60.0)]
    report.write_results(path, [again, *refined, left_out])
    text = path.read_text()
    of_size = section(text, "GPU: 0.5b")
    assert of_size.count("tokens/s") == 2
    assert of_size.index("### decode") < of_size.index("60.0 tokens/s") < of_size.index("### swap")
    assert "- not run: none (the time was up)" in of_size
    assert section(text, "run-api").strip() == "kept"
    assert report.status_states(section(text, "GPU").splitlines()) == {
        ("0.5b", "decode"): "2026-02-03, commit abc1234; not run: none (the time was up)",
        ("0.5b", "swap"): "2026-01-02, commit abc1234",
    }


def test_parts_that_have_not_run_are_listed_with_their_command(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    report.write_results(path, [FACTS, FAILED])
    assert "## GPU: 0.5b" not in path.read_text()
    rows = [line for line in path.read_text().splitlines() if "not run on a GPU yet" in line]
    assert len(rows) == 3 * len(PARTS)
    assert 'make bench-gpu SIZE=7b BENCH_FLAGS="--parts train"' in rows[-1]
    on_cpu = FACTS.model_copy(update={"size": "tiny", "on_gpu": False})
    report.write_results(path.with_name("CPU.md"), [on_cpu, figure()])
    assert "## GPU: tiny (on a CPU)" in path.with_name("CPU.md").read_text()
    assert "\n## GPU\n" not in path.with_name("CPU.md").read_text()


def test_the_file_in_the_repository_lists_every_size_and_part() -> None:
    text = (Path(__file__).parents[2] / "benchmarks/RESULTS.md").read_text()
    rows = [line.split("|")[1:3] for line in section(text, "GPU").splitlines() if "|" in line]
    named = {(size.strip(), part.strip()) for size, part in rows}
    assert {(size, part) for size in report.STATUS_SIZES for part in PARTS} <= named


# --- models, adapters and batches to measure with -------------------------------------------------


@pytest.mark.full
def test_random_weights_load_and_are_served(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from benchmarks.gpu_bench.random_adapter import write_random_adapter
    from benchmarks.gpu_bench.random_model import make_random_model, model_config
    from grpo_core.weight_files import WeightKind, require_complete, require_rank

    directory = make_random_model("tiny", tmp_path / "model", torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert sum(p.numel() for p in model.parameters()) == TINY.parameters
    assert model.dtype == torch.bfloat16
    assert float(model.lm_head.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert AutoTokenizer.from_pretrained(directory).encode("a b") != []
    for size in SHAPE_NAMES:
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(model_config(SHAPES[size], torch.bfloat16))
        assert sum(p.numel() for p in built.parameters()) == SHAPES[size].parameters
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
    assert {origin.shared_tokens for origin in batch.origins} == {2}
    for variant in [*forward_variants(ADAMW), *optimizer_variants(ADAMW)]:
        settings_with(variant.optimizer)
