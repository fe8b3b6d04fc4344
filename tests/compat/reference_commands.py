"""The command lines of the archived trainer's documents, and what our programs make of them."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from grpo_core.settings import CommandSettings, load_settings
from grpo_core.tree.run_api import RunApiSettings
from grpo_core.tree.server import ServerSettings
from grpo_core.tree.trainer_command import CommandLine
from grpo_env.settings import EnvServerSettings
from grpo_runs.settings.compare import CompareSettings
from grpo_runs.settings.run import RunSettings

LIST = Path(__file__).parent / "reference_commands.txt"

GRPO, GRPO_RUN, SERVER = "grpo", "grpo-run", "vllm-api-server"
RUN_API, ENVIRONMENT, COMPARE, STOCK_VLLM = "run-api", "env-server", "grpo-compare", "vllm"
PROGRAMS: Mapping[str, str] = {
    "run-api": RUN_API,
    "atroposlib.cli.run_api": RUN_API,
    "example_trainer.grpo": GRPO,
    "example_trainer/grpo.py": GRPO,
    "example_trainer.run": GRPO_RUN,
    "example_trainer.vllm_api_server": SERVER,
    "example_trainer/vllm_api_server.py": SERVER,
    "vllm_api_server.py": SERVER,
    "environments/gsm8k_server.py": ENVIRONMENT,
    "./example_trainer/scripts/run_comparison.sh": COMPARE,
    "vllm.entrypoints.openai.api_server": STOCK_VLLM,
}
"""The archived name of each program, and the name of ours."""
FRAGMENT = ""
"""Stands for the program of options that a document shows alone."""
LEFT_OUT = "..."

_MODELS = frozenset({"--model", "--model-name", "--openai.model_name", "--env.tokenizer_name"})
_NEEDS_MODEL = frozenset({GRPO, GRPO_RUN, SERVER, ENVIRONMENT})
_MODES: Mapping[str, tuple[str, ...]] = {
    "--vllm-config-path": ("--weight-bridge-mode", "shared_vllm"),
    **{
        f"--lora-{name}": ("--weight-bridge-mode", "lora_only")
        for name in ("r", "alpha", "dropout", "target-modules", "layer-indices")
    },
}
"""The mode of options that other modes ignore."""
_ASSIGNMENT = re.compile(r"[A-Z_]+=")


@dataclass(frozen=True)
class Command:
    """One command line.

    Args:
        place: document and line, for example `latest:123`
        program: as in the document, or `FRAGMENT`
        arguments: may contain `LEFT_OUT`
    """

    place: str
    program: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> str:
        """The name of our program."""
        if self.program != FRAGMENT:
            return PROGRAMS[self.program]
        of_environment = self.arguments[0].startswith(("--openai.", "--env.", "--slurm"))
        return ENVIRONMENT if of_environment else GRPO

    @property
    def typed(self) -> list[str]:
        """The words of the document without the variables, to run in `scripts/compat/`."""
        if self.program == RUN_API or self.program.startswith("./"):
            return [self.program, *self.arguments]
        if self.program == FRAGMENT:
            return [*self.arguments]
        module = [] if self.program.endswith(".py") else ["-m"]
        return ["python", *module, self.program, *self.arguments]

    def for_ours(self, model: str, port: int) -> list[str]:
        """The words that follow our program's name: complete, with this model and this port."""
        words: list[str] = []
        for before, word in zip(["", *self.arguments], self.arguments, strict=False):
            if before in _MODELS:
                words.append(model)
            elif before == "--port":
                words.append(str(port))
            elif word != LEFT_OUT:
                words.append(word)
        if self.command in _NEEDS_MODEL and not _MODELS.intersection(words):
            words += ["--model", model]
        if self.command == ENVIRONMENT:
            return ["gsm8k", *words]
        if self.program == FRAGMENT:
            return [*words, *_MODES.get(words[0], ())]
        if self.command == COMPARE:
            return [*(word for steps in words for word in ("--steps", steps))]
        return words


def commands() -> Iterator[Command]:
    for line in LIST.read_text().splitlines():
        place, *words = shlex.split(line)
        variables = dict(word.split("=", 1) for word in takewhile(_ASSIGNMENT.match, words))
        words = words[len(variables) :]
        program = FRAGMENT if words[0].startswith("--") else words.pop(0)
        yield Command(place, program, tuple(words), variables)


KINDS: Mapping[str, type[CommandSettings]] = {
    GRPO: CommandLine,
    GRPO_RUN: RunSettings,
    SERVER: ServerSettings,
    RUN_API: RunApiSettings,
    ENVIRONMENT: EnvServerSettings,
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
    if command.command == STOCK_VLLM:
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
