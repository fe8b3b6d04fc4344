"""The GPU benchmark's arithmetic, records and report. What it measures, it measures on a GPU."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.gpu_bench import counts, report
from benchmarks.gpu_bench.bench import at_least, at_most
from benchmarks.gpu_bench.budget import Budget
from benchmarks.gpu_bench.completion_log import CompletionLog
from benchmarks.gpu_bench.figures import (
    Figure,
    Limit,
    NotRun,
    Recorder,
    RunFacts,
    read_records,
    told,
    verdict,
)
from benchmarks.gpu_bench.publish_part import NUDGE, TimedOptimizer
from benchmarks.gpu_bench.random_adapter import write_random_adapter
from benchmarks.gpu_bench.random_model import make_random_model, model_config
from benchmarks.gpu_bench.render import runs_in
from benchmarks.gpu_bench.settings import PARTS, TrainWork
from benchmarks.gpu_bench.shapes import SHAPE_NAMES, SHAPES, ShapeName
from benchmarks.gpu_bench.train_batch import random_batch, trained_lengths
from benchmarks.gpu_bench.train_variants import ADAMW, forward_variants, optimizer_variants
from benchmarks.gpu_bench.trainee import settings_with
from benchmarks.gpu_bench.training_memory import bytes_per_weight, step_bytes_per_weight
from grpo_core.weight_files import WeightKind, require_complete, require_rank

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


def figure(part: str = "decode", name: str = "speed", value: float = 97.0) -> Figure:
    return Figure.of(part, name, "tokens/s", [value - 1, value, value + 2])  # type: ignore[arg-type]


# --- counts -------------------------------------------------------------------------------------


def test_weights_of_the_tiny_shape_counted_by_hand() -> None:
    # q and o 128 x 128, k and v 128 x 64, three of 128 x 512, in two layers; the head 128 x 512
    assert TINY.matmul_parameters == 2 * (49_152 + 196_608) + 65_536
    # biases 128 + 64 + 64 and norms 2 x 128 per layer, the last norm
    assert TINY.parameters == TINY.matmul_parameters + 2 * (256 + 256) + 128


@pytest.mark.parametrize(
    ("size", "parameters"), [("0.5b", 494_032_768), ("1.5b", 1_543_714_304), ("7b", 7_615_616_512)]
)
def test_shapes_are_those_of_qwen(size: ShapeName, parameters: int) -> None:
    assert SHAPES[size].parameters == parameters


@pytest.mark.parametrize("size", SHAPE_NAMES)
def test_transformers_builds_models_of_these_shapes(size: ShapeName) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(SHAPES[size], torch.bfloat16))
    assert sum(p.numel() for p in model.parameters()) == SHAPES[size].parameters


def test_training_flops_by_hand() -> None:
    weights = 6 * TINY.matmul_parameters * 5
    attention = 12 * 2 * 128 * (1 + 2 + 3 + 1 + 2)  # each token sees itself and those before
    assert counts.train_flops(TINY, [3, 2]) == weights + attention


def test_decoding_reads_the_weights_once_and_every_cache() -> None:
    per_token = 2 * 2 * 64 * BFLOAT16  # keys and values of two layers
    assert TINY.kv_bytes_per_token(BFLOAT16) == per_token
    expected = TINY.matmul_parameters * BFLOAT16 + 8 * 100 * per_token
    assert counts.decode_step_bytes(TINY, 8, 100, BFLOAT16) == expected


@pytest.mark.parametrize(("size", "tokens_per_s"), [("0.5b", 292e3), ("1.5b", 116e3), ("7b", 41e3)])
def test_decode_limits_of_an_h200(size: ShapeName, tokens_per_s: float) -> None:
    """256 sequences with 1,024 tokens each; 4 % for embeddings, which those numbers count."""
    limit = counts.decode_limit(SHAPES[size], 256, 1024, BFLOAT16, counts.BANDWIDTH_H200)
    assert limit == pytest.approx(tokens_per_s, rel=0.04)


def test_a_publication_reads_and_writes_every_weight() -> None:
    moved = counts.publication_bytes(SHAPES["7b"], BFLOAT16)
    assert moved / counts.BANDWIDTH_H200 == pytest.approx(6.4e-3, rel=0.01)


def test_percentiles_are_measured_values() -> None:
    values = [float(n) for n in range(50, 0, -1)]
    assert counts.percentile(values, 50) == 25
    assert counts.percentile(values, 98) == 49
    assert counts.percentile(values, 99) == 50
    assert counts.percentile([3.0], 99) == 3.0


def test_lengths_are_spread_evenly() -> None:
    assert counts.evenly_spread(512, 2048, 4) == [512, 1024, 1536, 2048]


def test_what_training_keeps() -> None:
    kept = bytes_per_weight({"optimizer": "adamw_8bit"}, micro_batches=1, number_bytes=BFLOAT16)
    assert (kept.weights, kept.masters, kept.gradients) == (2, 4, 2)
    assert kept.total * SHAPES["7b"].parameters == pytest.approx(76e9, rel=0.01)
    plain = bytes_per_weight({}, micro_batches=2, number_bytes=BFLOAT16)
    assert plain.total == 2 + 4 + 8 + 4


def test_what_a_step_moves() -> None:
    kept = bytes_per_weight({}, micro_batches=1, number_bytes=BFLOAT16)
    # gradient 2, master and moments 2 x 12, staged 2, copied 2 + 2
    assert step_bytes_per_weight(kept, BFLOAT16) == 32
    low = bytes_per_weight({"master_dtype": "bfloat16"}, 1, BFLOAT16)
    assert step_bytes_per_weight(low, BFLOAT16) == 2 + 2 * (2 + 8) + 4


# --- time ---------------------------------------------------------------------------------------


def test_what_a_part_does_not_use_is_shared() -> None:
    now = [0.0]
    budget = Budget(480.0, clock=lambda: now[0])
    first = budget.deadline(PARTS)
    assert first.left_s == pytest.approx(200.0)
    now[0] = 20.0
    assert budget.deadline(["memory", "publish"]).left_s == pytest.approx(460.0 / 4)
    assert budget.deadline(["train"]).left_s == 460.0
    now[0] = 500.0
    assert budget.deadline(["train"]).passed


def test_rates_count_requests_that_end_in_the_windows() -> None:
    log = CompletionLog()
    for end, tokens in ((1.0, 10), (2.0, 20), (3.0, 30), (4.0, 40)):
        log.add(end, tokens)
    assert log.rate([(1.0, 3.0)]) == 15.0
    assert log.rate([(0.5, 1.5), (3.5, 4.5)]) == 25.0
    assert (log.tokens, log.last_s) == (100, 4.0)


# --- records ------------------------------------------------------------------------------------


def test_records_come_back_from_the_file(tmp_path: Path) -> None:
    out, path = io.StringIO(), tmp_path / "new" / "figures.jsonl"
    recorder = Recorder(path, out)
    limited = figure().model_copy(
        update={"limit": Limit(value=200.0, what="memory"), "goal": at_least(97.5)}
    )
    for record in (FACTS, limited, NotRun(part="memory", name="", reason="no GPU")):
        recorder.add(record)
    assert read_records(path.read_text().splitlines()) == recorder.records
    lines = out.getvalue().splitlines()
    assert "97.0 tokens/s (96.0 to 99.0, n = 3); 0.485 x the limit (memory)" in lines[-2]
    assert "goal at least 97.5: **missed**" in lines[-2]
    assert lines[-1] == "memory: all of it: not run: no GPU"


def test_a_line_that_is_no_record_is_refused() -> None:
    with pytest.raises(ValidationError):
        read_records([json.dumps({"record": "figure", "name": "x"})])


def test_goals() -> None:
    assert at_least(0.97).is_met(0.97)
    assert not at_least(0.97).is_met(0.969)
    assert at_most(10).is_met(10.0)
    assert not at_most(10).is_met(10.1)
    assert verdict(figure()) == ""


def test_a_single_measurement_has_no_spread() -> None:
    assert told(Figure.of("memory", "used", "GiB", [1.5])) == "memory: used: 1.50 GiB (n = 1)"


def test_a_file_may_hold_several_runs() -> None:
    lines = [r.model_dump_json() for r in (FACTS, figure(), FACTS, figure(), figure("train"))]
    assert [len(run) for run in runs_in(lines)] == [2, 3]


# --- RESULTS.md ---------------------------------------------------------------------------------


def section(text: str, heading: str) -> str:
    return text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def test_what_was_measured_takes_its_place_and_leaves_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    path.write_text("# Results\n\n## run-api\n\nkept\n")
    report.write_results(
        path, [FACTS, figure("decode", "speed", 50.0), figure("swap", "time", 5.0)]
    )
    again = FACTS.model_copy(update={"date": "2026-02-03 00:00 UTC"})
    left_out = NotRun(part="decode", name="none", reason="the time\nwas up")
    report.write_results(path, [again, figure("decode", "speed", 60.0), left_out])
    text = path.read_text()
    of_size = section(text, "GPU: 0.5b")
    assert "60.0 tokens/s" in of_size
    assert "50.0 tokens/s" not in of_size
    assert "- not run: none (the time was up)" in of_size
    assert of_size.index("### decode") < of_size.index("### swap") < of_size.index("5.00 tokens/s")
    assert section(text, "run-api").strip() == "kept"
    states = report.status_states(section(text, "GPU").splitlines())
    assert states == {
        ("0.5b", "decode"): "2026-02-03, commit abc1234; not run: none (the time was up)",
        ("0.5b", "swap"): "2026-01-02, commit abc1234",
    }


def test_what_has_not_run_names_its_command() -> None:
    rows = [line for line in report.status_section({}) if "not run on a GPU yet" in line]
    assert len(rows) == 3 * len(PARTS)
    assert 'make bench-gpu SIZE=7b BENCH_FLAGS="--parts train"' in rows[-1]
    assert report.status_states(rows) == {}


def test_a_part_without_a_figure_has_not_run(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    report.write_results(path, [FACTS, NotRun(part="train", name="", reason="failed")])
    assert "## GPU: 0.5b" not in path.read_text()
    assert report.status_states(path.read_text().splitlines()) == {}


def test_a_cpu_says_nothing_about_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    facts = FACTS.model_copy(update={"size": "tiny", "on_gpu": False})
    report.write_results(path, [facts, figure()])
    assert "## GPU: tiny (on a CPU)" in path.read_text()
    assert "\n## GPU\n" not in path.read_text()


def test_a_refined_figure_stands_for_those_before_it() -> None:
    lines = report.part_tables(FACTS, [FACTS, figure(value=1.0), figure(value=2.0)])["decode"]
    assert sum("speed" in line for line in lines) == 1
    assert any("2.00 tokens/s" in line for line in lines)


def test_the_file_in_the_repository_lists_every_size_and_part() -> None:
    text = (Path(__file__).parents[2] / "benchmarks/RESULTS.md").read_text()
    lines = section(text, "GPU").splitlines()
    found = {tuple(line.split("|")[1:3]) for line in lines if line.startswith("|")}
    named = {(size.strip(), part.strip()) for size, part in found}
    assert {(size, part) for size in report.STATUS_SIZES for part in PARTS} <= named


# --- what is measured with ----------------------------------------------------------------------


def test_a_random_model_loads_as_any_other(tmp_path: Path) -> None:
    directory = make_random_model("tiny", tmp_path / "model", torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert sum(p.numel() for p in model.parameters()) == TINY.parameters
    assert model.dtype == torch.bfloat16
    assert float(model.lm_head.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert torch.all(model.model.norm.weight == 1)
    assert AutoTokenizer.from_pretrained(directory).encode("a b") != []
    before = (directory / "config.json").stat().st_mtime_ns
    assert make_random_model("tiny", directory, torch.bfloat16) == directory
    assert (directory / "config.json").stat().st_mtime_ns == before


def test_a_random_adapter_is_one_that_the_server_takes(tmp_path: Path) -> None:
    directory = write_random_adapter(TINY, 16, tmp_path / "adapter", seed=0)
    require_complete(WeightKind.ADAPTER, directory)
    require_rank(directory, 16)


def test_a_random_batch_has_the_lengths_of_its_work() -> None:
    work = TrainWork(4, 16, 64, micro_batch=2, steps=1, min_steps=1)
    batch = random_batch(TINY, work, seed=0)
    assert len(batch.micro_batches) == 2
    assert sorted(trained_lengths(batch)) == [15, 31, 47, 63]
    assert {origin.shared_tokens for origin in batch.origins} == {2}


def test_the_trainer_has_the_options_that_are_measured() -> None:
    variants = [*forward_variants(ADAMW), *optimizer_variants(ADAMW)]
    assert len({variant.name for variant in variants}) == len(variants)
    for variant in variants:
        settings_with(variant.optimizer)


def test_a_publication_without_a_write_leaves_the_weights() -> None:
    parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = TimedOptimizer([parameter], torch.device("cpu"))
    parameter.float().sum().backward()
    optimizer.writes = False
    optimizer.step(0)
    optimizer.write_into_parameters()
    assert torch.equal(parameter, torch.ones(4, dtype=torch.bfloat16))
    optimizer.writes = True
    optimizer.step(0)
    optimizer.write_into_parameters()
    assert float(optimizer.masters[0][0]) == pytest.approx(1 + NUDGE)
    assert optimizer.unwritten_parameters() == 0
