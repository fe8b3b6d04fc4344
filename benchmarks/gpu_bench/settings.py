"""Options of the GPU benchmark, and how much work it does with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from benchmarks.gpu_bench.shapes import ShapeName
from grpo_core.settings import CommandSettings

PartName = Literal["decode", "swap", "memory", "publish", "placement", "train"]
PARTS: tuple[PartName, ...] = get_args(PartName)
"""In the order in which they are measured: servers that are no longer needed make room."""
PART_WEIGHTS: dict[PartName, float] = {
    "decode": 200,
    "swap": 45,
    "memory": 15,
    "publish": 45,
    "placement": 60,
    "train": 115,
}
"""Shares of the time that is left, among the parts that are still to come."""


class GpuBenchSettings(CommandSettings):
    """Measure decoding, publication, adapter swaps, training, memory and sharing of one GPU, with a
    model of random weights, and write a section of benchmarks/RESULTS.md."""

    model_config = SettingsConfigDict(cli_prog_name="bench-gpu", env_prefix="BENCH_GPU_")

    size: ShapeName = Field(description="Shape of the model; tiny runs on a CPU too")
    parts: list[PartName] = Field(list(PARTS), min_length=1, description="What to measure")
    seconds_budget: float = Field(
        480.0,
        gt=0,
        description="Seconds after which nothing new is begun; what has begun is ended in short",
    )
    results: Path | None = Field(
        None, description="Markdown file whose section is replaced, part by part"
    )
    figures: Path = Field(
        Path("runs/gpu-bench/figures.jsonl"),
        description="File that every figure is appended to as soon as it is known",
    )
    directory: Path | None = Field(
        None,
        description="Where the model, logs and vLLM's compiled code lie, and are found again by "
        "the next run (default: a temporary one)",
    )
    vllm_flags: str = Field(
        "", description="More flags for every server, bare vLLM too, as one string"
    )
    commit: str | None = Field(
        None, description="What is measured, where git does not say it (default: git's HEAD)"
    )


@dataclass(frozen=True)
class DecodeWork:
    """`concurrencies`: requests at once, all begun together; each decodes `new_tokens`."""

    concurrencies: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    rounds: int
    min_rounds: int


@dataclass(frozen=True)
class LoadWork:
    """Generations that go on beside what is measured. `new_tokens`: of one request, least and most:
    requests that end at one time would end in waves."""

    concurrency: int
    prompt_tokens: int
    new_tokens: tuple[int, int]


@dataclass(frozen=True)
class TrainWork:
    """Sequences of `shortest` to `longest` tokens, evenly spread; `micro_batch`: at a time."""

    sequences: int
    shortest: int
    longest: int
    micro_batch: int
    steps: int
    min_steps: int


@dataclass(frozen=True)
class Workload:
    """How much is measured on one model."""

    dtype: str
    engine_flags: tuple[str, ...]
    """But for the next."""
    cache_bytes: int
    """Of keys and values in each server. It is named, because servers that start side by side
    cannot find out what there is room for."""
    servers_at_once: int
    """That may be up beside each other; all but one of them idle."""
    decode: DecodeWork
    load: LoadWork
    """Beside publications and in placement."""
    short_load: LoadWork
    """Beside swaps: short requests, whose ends tell how fast decoding is at any moment."""
    publications: int
    between_publications_s: float
    swaps: int
    between_swaps_s: float
    train: TrainWork
    placement_s: float
    """How long either half of the common work takes alone, about."""
    placement_rounds: int


def workload(size: ShapeName, kv_bytes_per_token: int, on_gpu: bool) -> Workload:
    """Args: kv_bytes_per_token: of the model in its data type."""
    if size == "tiny":
        return _tiny(on_gpu)
    return _real(size, kv_bytes_per_token)


_MICRO_BATCH: dict[ShapeName, int] = {"0.5b": 8, "1.5b": 4, "7b": 2}
_CACHED_TOKENS = 160_000
"""Room for 256 sequences of 512 tokens, and some."""


def _real(size: ShapeName, kv_bytes_per_token: int) -> Workload:
    return Workload(
        dtype="bfloat16",
        engine_flags=(
            *("--max-model-len", "2048", "--max-num-seqs", "256"),
            *("--gpu-memory-utilization", "0.25"),
        ),
        cache_bytes=_CACHED_TOKENS * kv_bytes_per_token,
        servers_at_once=4,
        decode=DecodeWork((1, 64, 256), 128, 256, rounds=7, min_rounds=3),
        load=LoadWork(64, 128, (192, 320)),
        short_load=LoadWork(64, 32, (16, 48)),
        publications=60,
        between_publications_s=0.05,
        swaps=24,
        between_swaps_s=1.2,
        train=TrainWork(8, 512, 2048, _MICRO_BATCH[size], steps=5, min_steps=3),
        placement_s=3.0,
        placement_rounds=3,
    )


def _tiny(on_gpu: bool) -> Workload:
    return Workload(
        dtype="bfloat16" if on_gpu else "float32",
        engine_flags=(
            *("--max-model-len", "512", "--max-num-seqs", "32"),
            *(("--gpu-memory-utilization", "0.1") if on_gpu else ("--enforce-eager",)),
        ),
        cache_bytes=64 * 2**20,
        servers_at_once=4 if on_gpu else 2,
        decode=DecodeWork((1, 16), 16, 32, rounds=3, min_rounds=2),
        load=LoadWork(8, 16, (24, 40)),
        short_load=LoadWork(8, 8, (8, 24)),
        publications=50,
        between_publications_s=0.02,
        swaps=20,
        between_swaps_s=0.4,
        train=TrainWork(8, 32, 128, 4, steps=3, min_steps=2),
        placement_s=1.0,
        placement_rounds=2,
    )
