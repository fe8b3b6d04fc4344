"""Options of the run-api benchmark, and how much work it does with them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, get_args

from pydantic import Field

from grpo_core.settings import Command, CommandSettings

ScenarioName = Literal[
    "submissions", "crowd", "status-env", "first-batch", "memory", "stalls", "minimums"
]
SystemName = Literal["atroposlib", "run-api"]
SCENARIOS: tuple[ScenarioName, ...] = get_args(ScenarioName)
SYSTEMS: tuple[SystemName, ...] = get_args(SystemName)


class BenchSettings(CommandSettings):
    """Measure run-api and the API server of atroposlib 0.4.0 under the same load, one after the
    other, and write the run-api section of docs/contributing/benchmarks.md."""

    command: ClassVar[Command] = Command(prog="bench-run-api")

    runs: int = Field(3, ge=1, description="how often everything is measured")
    quick: bool = Field(
        False, description="one run of small sizes, to see that it works; writes no results"
    )
    full_depth: bool = Field(
        False,
        description="also GET /batch behind 10,000 groups of full size: takes 10 GB of memory "
        "with atroposlib",
    )
    systems: list[SystemName] = Field(
        list(SYSTEMS), min_length=1, description="what to measure; results need both"
    )
    scenarios: list[ScenarioName] = Field(
        list(SCENARIOS), min_length=1, description="what to measure of it; results need all"
    )
    fsync: bool = Field(
        False,
        description="instead: run-api alone, on Redis with appendfsync always and everysec in turn",
    )
    results: Path = Field(
        Path("docs/contributing/benchmarks.md"), description="file whose section is replaced"
    )

    @property
    def effective_runs(self) -> int:
        return 1 if self.quick else self.runs

    @property
    def is_complete(self) -> bool:
        """Whether the numbers are worth keeping."""
        everything = set(self.systems) == set(SYSTEMS) and set(self.scenarios) == set(SCENARIOS)
        return everything and not self.quick

    def sizes(self) -> Sizes:
        if self.quick:
            return QUICK
        return WITH_FULL_DEPTH if self.full_depth else FULL


@dataclass(frozen=True)
class Sizes:
    """How much is sent and asked. Depths are in queued groups."""

    distinct_groups: int
    depths: tuple[int, ...]
    submissions: int
    in_flight: int
    """Connections of the crowd."""
    polls: int
    full_size_depth: int | None
    """Depth at which `GET /batch` is also measured with groups of full size."""
    memory_groups: int
    idle_s: float
    """How long a server with nothing to do is probed."""
    large_body_bytes: int
    bomb_bytes: int
    large_batch_sequences: int
    long_list_groups: int
    minimum_depths: tuple[int, ...]
    deeper_minimum_depths: tuple[int, ...]
    """For run-api only: atroposlib would take minutes."""


FULL = Sizes(
    distinct_groups=64,
    depths=(0, 1_000, 10_000),
    submissions=512,
    in_flight=512,
    polls=1_000,
    full_size_depth=None,
    memory_groups=1_000,
    idle_s=3.0,
    large_body_bytes=30_000_000,
    bomb_bytes=1 << 30,
    large_batch_sequences=1_024,
    long_list_groups=1_000,
    minimum_depths=(500, 1_000, 2_000),
    deeper_minimum_depths=(4_000,),
)
WITH_FULL_DEPTH = replace(FULL, full_size_depth=10_000)
QUICK = Sizes(
    distinct_groups=16,
    depths=(0, 1_000),
    submissions=64,
    in_flight=64,
    polls=100,
    full_size_depth=None,
    memory_groups=128,
    idle_s=1.0,
    large_body_bytes=10_000_000,
    bomb_bytes=1 << 27,
    large_batch_sequences=256,
    long_list_groups=500,
    minimum_depths=(125, 250, 500),
    deeper_minimum_depths=(1_000,),
)
