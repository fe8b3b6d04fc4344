"""The services of a run, and what each of them does now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

import psutil
from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from grpo_core.weights.servers import ServerState
from grpo_runs.run_directory import MODEL_JOB, ONE_OF_SERVERS, ONE_SERVER, RunDirectory
from grpo_runs.watch.logs import EnvironmentReport

STAGES = {
    "data_fetch": "waiting for data",
    "compute": "training",
    "sync": "publishing",
    "save": "saving",
}
"""Of the trainer, as `stage.json` names them."""
ENVIRONMENT = "environment"
Pid = Annotated[int, Field(ge=0, lt=2**31)]
Model = TypeVar("Model", bound=BaseModel)


class Begun(BaseModel):
    """The process that started a run. `created`: Unix time in seconds"""

    pid: Pid
    created: FiniteFloat


class RunEnd(BaseModel):
    """How a run ended. Args: time: Unix time in seconds; text: of the error, "" for none"""

    state: str
    time: FiniteFloat
    text: str


class TrainerStage(BaseModel):
    """The content of `stage.json`. `since`: Unix time in seconds"""

    stage: str
    since: FiniteFloat
    pid: Pid


class MemorySample(BaseModel):
    """A line of `processes.jsonl`: memory of each service."""

    bytes: dict[str, Annotated[int, Field(ge=0, lt=2**63)]]


class Processes(BaseModel):
    """`services.json`: the process that started a run, and those that it started, by name."""

    runner: Begun
    run_api_url: str | None
    services: dict[str, Pid]
    end: RunEnd | None
    _file: Path

    @classmethod
    def read(cls, path: Path) -> Processes | None:
        """None for a run that was started otherwise."""
        found = read_file(cls, path)
        if found is not None:
            found._file = path
        return found

    @cached_property
    def is_alive(self) -> bool:
        return self.end is None and created(self.runner.pid) == self.runner.created

    @cached_property
    def left_over(self) -> frozenset[str]:
        """Names of services that run although the command was killed. A process that was created
        after their ids were noted is another one."""
        if self.is_alive or self.end:
            return frozenset()
        began, noted_at = self.runner.created, self._file.stat().st_mtime
        found = {name: created(pid) for name, pid in self.services.items()}
        return frozenset(name for name, at in found.items() if at and began <= at <= noted_at)


def read_file(kind: type[Model], path: Path) -> Model | None:
    """None if the file is missing or broken."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def stage_of(run: RunDirectory) -> TrainerStage | None:
    """Of the run's trainer, or of the one whose --save-path the directory is."""
    places = (path / "stage.json" for path in (run.checkpoints, run.path))
    return next(filter(None, (read_file(TrainerStage, place) for place in places)), None)


def is_stage_of(record: TrainerStage, pids: Mapping[str, int]) -> bool:
    """Whether the trainer among these processes wrote this `stage.json`."""
    return record.pid == pids.get("trainer")


def created(pid: int) -> float | None:
    """Unix time in seconds; None if the process has ended, even if nobody has asked for its status
    yet."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None


def _view(stage: str, since: float | None = None, detail: str = "") -> dict[str, Any]:
    """Args: since: Unix time in seconds at which the stage began, None if it is not known"""
    return {"stage": stage, "since": since, "detail": detail}


@dataclass(frozen=True)
class ServiceFacts:
    """What is known of a run's services.

    Args:
        pids: process ids by name
        began: Unix time in seconds at which the command began: what is older is of a run before a
            resume
        left_over: see `Processes`
        memory: bytes by name
        trainer: content of `stage.json`
        environments: their newest reports, by name
        servers: answer of run-api's `/servers`
        api_away_since: Unix time in seconds
    """

    pids: Mapping[str, int]
    is_running: bool
    began: float = 0.0
    left_over: frozenset[str] = frozenset()
    memory: Mapping[str, int] = field(default_factory=dict)
    trainer: TrainerStage | None = None
    environments: Mapping[str, EnvironmentReport] = field(default_factory=dict)
    servers: Sequence[Mapping[str, Any]] = ()
    api_away_since: float | None = None

    def shown(self) -> list[dict[str, Any]]:
        """One entry for each service, in the order of their start."""
        memory = self.memory if self.is_running else {}
        return [
            {"name": name, **self._service(name), "memory_bytes": memory.get(name)}
            for name in self._names()
        ]

    def _names(self) -> list[str]:
        if self.pids or self.is_running or self.trainer is None:
            return [name for name in self.pids if name != MODEL_JOB]
        return ["trainer"]  # of a --save-path, whose other services are elsewhere

    def _service(self, name: str) -> dict[str, Any]:
        if name in self.left_over:
            return _view("still running", detail=f"process {self.pids[name]}")
        if self.pids and not (self.is_running and created(self.pids[name])):
            return _view("ended")
        if name == "trainer":
            return self._of_trainer()
        if name == "run-api" and self.api_away_since is not None:
            return _view("does not answer", self.api_away_since)
        if name == ONE_SERVER or name.startswith(ONE_OF_SERVERS):
            return self._of_server(name)
        if name.startswith(ENVIRONMENT):
            return self._of_environment(name)
        return _view("running")

    def _starting(self) -> dict[str, Any]:
        return _view("starting", self.began or None)

    def _of_trainer(self) -> dict[str, Any]:
        found, is_known = self.trainer, self.is_running or self.pids
        if found is None or (is_known and not is_stage_of(found, self.pids)):  # before a resume
            return self._starting()
        return _view(STAGES.get(found.stage, found.stage), found.since)

    def _of_server(self, name: str) -> dict[str, Any]:
        single = len(self.servers) == 1 and name == ONE_SERVER
        found = next((one for one in self.servers if single or one["name"] == name), None)
        if found is None:
            return self._starting() if self.trainer is None else _view("not reported")
        samples = any(one.groups or one.evaluation for one in self.environments.values())
        stage = "sampling" if found["state"] == ServerState.SERVING and samples else found["state"]
        version = found["version"]
        step = version["step"] if isinstance(version, Mapping) else version[1]
        return _view(stage, detail=f"weights of step {step}")

    def _of_environment(self, name: str) -> dict[str, Any]:
        report = self.environments.get(name)
        if report is None or not report.is_since(self.began):
            return self._starting()
        if report.evaluation:
            return _view("evaluating", detail=report.evaluation)
        count = report.groups
        groups = "1 group" if count == 1 else f"{count} groups"
        progress = [f"{groups} in progress"] if count else []
        detail = "; ".join([*progress, *filter(None, [report.for_batch])])
        return _view("sampling" if count else "waiting", detail=detail)
