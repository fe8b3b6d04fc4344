"""docs/trainer.md names every option, error and reason of the code, and no other."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from grpo_core.errors import GrpoError
from grpo_trainer import errors
from grpo_trainer.settings import TrainerSettings

PAGE = (Path(__file__).parents[3] / "docs" / "trainer.md").read_text()


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_every_option() -> None:
    named = set(re.findall(r"`--([a-z-]+)`", section("Options")))
    fields = {name.replace("_", "-") for name in TrainerSettings.model_fields}
    assert named == fields | {"model", "vllm-gpu-memory-utilization"}


def test_every_error() -> None:
    named = set(re.findall(r"`([A-Z]\w+)`", section("Errors and exit status")))
    ours = {
        name
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, GrpoError) and not kind.__subclasses__()
    }
    of_services = {"ServiceUnavailable", "RequestRefused", "ProtocolViolation"}
    of_run_api = {"TrainerSuperseded", "LeasesFull", "UnknownBatch"}
    assert named == ours | of_services | of_run_api


def test_every_reason() -> None:
    named = re.findall(r"(?m)^\| `(\w+)` \|", section("Groups that cannot be trained on"))
    assert sorted(named) == sorted(errors.UnusableReason)
