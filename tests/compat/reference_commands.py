"""The command lines of the archived trainer's documents: read from them, and kept in a copy.

`python -m tests.compat.reference_commands` writes the copy.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

DOCUMENTS = Path(__file__).parents[3] / "shared" / "reference"
COPY = Path(__file__).parent / "reference_commands.txt"
NAMES = ("early", "middle", "latest")

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
_BEGINS = re.compile(r"(export |cd |time |run-api\b|python |\./|[A-Z_]+=|--[a-z])")
_ASSIGNMENT = re.compile(r"([A-Z_]+)=(.*)", re.DOTALL)
_ROW = re.compile(r"\|?\s*`?(--[\w-]+)`?(?: or `--[\w-]+`)? \|\s*([^|]*)")
_SEPARATORS = frozenset({"&&", "&", ";", "|"})
_SAMPLES: Mapping[str, tuple[str, ...]] = {
    "--model-name": ("m",),
    "--train-layer-indices": ("0-1",),
    "--lora-target-modules": ("q_proj", "v_proj"),
    "--lora-layer-indices": ("0-1",),
    "--vllm-config-path": ("vllm_bridge_config.json",),
    "--vllm-gpu": ("0",),
    "--wandb-project": ("p",),
    "--wandb-group": ("g",),
}
"""Values for rows of a table whose default is no value."""


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
        """The words of the document without the variables, to run in the directory `compat/`."""
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

    def __str__(self) -> str:
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        program = [self.program] if self.program else []
        return shlex.join([*variables, *program, *self.arguments])


def commands() -> Iterator[Command]:
    """The copy's commands. This is the list that tests run."""
    for line in COPY.read_text().splitlines():
        place, _, text = line.partition(" ")
        yield _parsed(place, shlex.split(text))


def read(name: str) -> Iterator[Command]:
    """The commands of one document, in order; then the rows of its tables of options."""
    lines = (DOCUMENTS / f"archived-trainer-{name}.md").read_text().splitlines()
    exported: dict[str, str] = {}
    variables: dict[str, str] = {}
    for number, line in _joined(lines):
        if line.startswith("```"):
            exported, variables = {}, {}
        if not _BEGINS.match(line) or _ROW.fullmatch(line):
            continue
        for words in _split(_substituted(line, variables)):
            if words[0] == "export":
                words = words[1:]
                exported |= _assignments(words)
            assigned = _assignments(words)
            if len(assigned) == len(words):
                variables |= assigned
            elif command := _command(f"{name}:{number}", words, exported):
                yield command
    yield from _rows(name, lines)


def _joined(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Lines that end with a backslash continue on the next one."""
    begun = 0
    parts: list[str] = []
    for number, line in enumerate(lines, 1):
        begun = begun if parts else number
        parts.append(line.strip().removesuffix("\\"))
        if not line.rstrip().endswith("\\"):
            yield begun, " ".join(parts).strip()
            parts = []


def _substituted(line: str, variables: Mapping[str, str]) -> str:
    return re.sub(r"\$(\w+)", lambda found: variables.get(found[1], found[0]), line)


def _split(line: str) -> Iterator[list[str]]:
    """The commands of a line of shell, without redirections."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    tokens = iter([*lexer, ";"])
    for token in tokens:
        if token in _SEPARATORS:
            if words:
                yield words
            words = []
        elif token.startswith((">", "<")):
            next(tokens)
            if words and words[-1].isdecimal():  # 2>&1
                words.pop()
        else:
            words.append(token)


def _assignments(words: list[str]) -> dict[str, str]:
    """Those at the beginning."""
    found: dict[str, str] = {}
    for word in words:
        match = _ASSIGNMENT.fullmatch(word)
        if match is None:
            break
        found[match[1]] = match[2]
    return found


def _command(place: str, words: list[str], exported: Mapping[str, str]) -> Command | None:
    """None if it is none of the archived programs."""
    words = [word for word in words if word != "time"]
    variables = dict(exported) | _assignments(words)
    words = words[len(_assignments(words)) :]
    if words[0] == "python":
        words = [word for word in words[1:] if word not in ("-u", "-m")]
    if words[0] in PROGRAMS:
        return Command(place, words[0], tuple(words[1:]), variables)
    return Command(place, FRAGMENT, tuple(words)) if words[0].startswith("--") else None


def _parsed(place: str, words: list[str]) -> Command:
    command = _command(place, words, {})
    assert command is not None, f"{COPY.name}: {place}: unknown program"
    return command


def _rows(name: str, lines: list[str]) -> Iterator[Command]:
    """Each option of a table, with its default. A row may be broken after its first cell."""
    for number, (line, following) in enumerate(zip(lines, [*lines[1:], ""], strict=True), 1):
        match = _ROW.match(line)
        if match is None:
            continue
        option, cell = match[1], match[2] or following.partition("|")[0]
        default = cell.strip().replace("`", "")
        if default.lower() == "false":
            yield Command(f"{name}:{number}", FRAGMENT, (option,))
        else:
            sample = _SAMPLES.get(option) or tuple(default.split())
            yield Command(f"{name}:{number}", FRAGMENT, (option, *sample))


def main() -> None:
    found = [command for name in NAMES for command in read(name)]
    COPY.write_text("".join(f"{command.place} {command}\n" for command in found))


if __name__ == "__main__":
    main()
