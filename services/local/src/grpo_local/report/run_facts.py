"""What is known of a run once it is over, and `summary.json`, which tells other programs."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from grpo_core.errors import ProtocolViolation
from grpo_core.weights.supervisor_protocol import SupervisorStatus
from grpo_local.modes import ModeName
from grpo_local.report.summary import Summary

Model = TypeVar("Model", bound=BaseModel)


class Benchmark(BaseModel):
    """What the runner takes from the trainer's `benchmark.json`; other keys are passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    publishes: int
    peak_cuda_bytes: int | None = None


class RunFacts(BaseModel):
    """None: nobody said."""

    model_config = ConfigDict(frozen=True)

    mode: ModeName
    seed: int
    summary: Summary
    benchmark: Benchmark | None
    server: SupervisorStatus | None
    """The last that the supervisor said while the trainer was there."""
    peak_bytes: dict[str, int]
    """Memory of each service's process tree."""

    @property
    def generation_tokens_per_s(self) -> float | None:
        """Over all of the training, restarts included."""
        if self.server is None:
            return None
        return self.server.generation_tokens / self.summary.training_s

    @property
    def publishes(self) -> int | None:
        return None if self.benchmark is None else self.benchmark.publishes

    @property
    def restarts(self) -> int | None:
        """Of the engine, asked for or not."""
        return None if self.server is None else self.server.restarts

    @property
    def dropped_requests(self) -> int | None:
        return None if self.server is None else self.server.dropped_requests

    @property
    def publication(self) -> str:
        """How often weights were published, and what that cost, as one line."""
        published = f"published {self.benchmark.publishes} times; " if self.benchmark else ""
        if self.server is None:
            return f"{published}the server did not say how often it restarted"
        return (
            f"{published}{counted(self.server.restarts, 'engine restart')}, "
            f"{counted(self.server.dropped_requests, 'dropped request')}"
        )


def counted(number: int, what: str) -> str:
    """`1 restart`, `2 restarts`."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def read_benchmark(path: Path) -> Benchmark | None:
    """None where there is none. Raises `ProtocolViolation` where it holds another thing."""
    return _read(Benchmark, path) if path.exists() else None


def write_facts(facts: RunFacts, path: Path) -> None:
    path.write_text(facts.model_dump_json(indent=2) + "\n")


def read_facts(path: Path) -> RunFacts:
    """Raises `ProtocolViolation` where the file is missing or holds something else."""
    return _read(RunFacts, path)


def _read(kind: type[Model], path: Path) -> Model:
    try:
        return kind.model_validate_json(path.read_text())
    except (OSError, ValidationError) as error:
        raise ProtocolViolation(f"{path} holds no {kind.__name__}: {error}") from None
