"""What our programs make of the archived command lines. Nothing is started."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from dataclasses import dataclass

from grpo_api.settings import RunApiSettings
from grpo_core.settings import CommandSettings, load_settings
from grpo_env.settings import EnvServerSettings
from grpo_local.settings import CompareSettings, RunSettings
from grpo_trainer.config.cli import CommandLine
from grpo_vllm.settings import ServerSettings
from tests.compat import reference_commands as reference
from tests.compat.reference_commands import COMPARE, Command

KINDS: Mapping[str, type[CommandSettings]] = {
    reference.GRPO: CommandLine,
    reference.GRPO_RUN: RunSettings,
    reference.SERVER: ServerSettings,
    reference.RUN_API: RunApiSettings,
    reference.ENVIRONMENT: EnvServerSettings,
    COMPARE: CompareSettings,
}
NOT_OURS = "vLLM's own server; the documents name this command as a mistake"
NEEDS_GPU = frozenset({"--vllm-gpu"})


@dataclass(frozen=True)
class Outcome:
    """`refusal`: the sentence that the user sees; None if the command line is accepted.
    `instead`: the command line of ours, if the archived program does not exist under its name."""

    refusal: str | None = None
    needs_gpu: bool = False
    instead: str | None = None

    def __str__(self) -> str:
        if self.refusal is not None:
            return f"refused: {self.refusal}"
        if self.instead is not None:
            return f"write `{self.instead}`"
        return "needs a GPU" if self.needs_gpu else "works"


def outcome(command: Command, model: str, port: int, *, dry_run: bool = False) -> Outcome:
    """Args: dry_run: check this machine too, as `--dry-run` does"""
    if command.command == reference.STOCK_VLLM:
        return Outcome(NOT_OURS)
    kind = KINDS[command.command]
    words = [*command.for_ours(model, port), *(["--dry-run"] if dry_run else [])]
    told = io.StringIO()
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
        try:
            load_settings(kind, words, command.environment)
            status: int | str | None = 0
        except SystemExit as ended:
            status = ended.code
    if status == 0:
        return Outcome(
            needs_gpu=bool(NEEDS_GPU.intersection(command.arguments)),
            instead=" ".join([command.command, *words]) if command.command == COMPARE else None,
        )
    lines = [line for line in told.getvalue().splitlines() if ": ignored" not in line]
    return Outcome("; ".join(line.partition(": ")[2] for line in lines))
