"""Entry points: each command parses its options, then imports the rest.

`python -m grpo_runs` is `grpo-demo`, and `python -m grpo_runs run` is `grpo-run`. The words
`compare`, `evaluate`, `rollouts`, `report`, `sft` and `watch` after `python -m grpo_runs` are
`grpo-compare`, `grpo-eval`, `grpo-rollouts`, `grpo-report`, `grpo-sft` and `grpo-watch`.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from grpo_core.settings import EXIT_USAGE, Command, CommandSettings, load_settings
from grpo_core.tree.trainer import AUTO, NEVER
from grpo_runs.run_directory import RunDirectory
from grpo_runs.settings.compare import CompareSettings
from grpo_runs.settings.evaluate import EvalSettings
from grpo_runs.settings.rollouts import ReportSettings, RolloutsSettings
from grpo_runs.settings.run import DEMO_FILE, DemoSettings, RunSettings
from grpo_runs.settings.sft import SftSettings
from grpo_runs.settings.watch import WatchSettings

FILES = (".yaml", ".yml", ".toml")


def main() -> None:
    """`grpo-demo`"""
    _start(DemoSettings, DEMO_FILE)


def run() -> None:
    """`grpo-run`"""
    _start(RunSettings)


def _start(kind: type[RunSettings], below: Path | None = None) -> NoReturn:
    words = with_config_of_resumed_run(kind.command, file_first(kind.command.prog, sys.argv[1:]))
    settings = load_settings(
        kind, words, at_start=True, below=below, dry_run_notes=command_lines_of_services
    )
    _require_usable_tasks(settings)
    if settings.starts_all:
        _run(settings, "commands.whole_run", "run_whole")
    _run(settings, "commands.pair", "run_pair")


def file_first(prog: str, words: Sequence[str]) -> list[str]:
    """`run.yaml --lr 1e-5` → `--config run.yaml --lr 1e-5`."""
    if not words or words[0].startswith("-"):
        return [*words]
    if Path(words[0]).suffix in FILES:
        return ["--config", *words]
    if Path(words[0]).is_file():
        _refuse(prog, f"{words[0]}: the name of a run's file ends in {' or '.join(FILES)}")
    return [*words]


def compare() -> None:
    """`grpo-compare`"""
    words = file_first(CompareSettings.command.prog, sys.argv[1:])
    settings = load_settings(CompareSettings, words, at_start=True)
    _run(settings, "commands.compare_modes", "compare_modes")


def rollouts() -> None:
    """`grpo-rollouts`"""
    settings = load_settings(RolloutsSettings, sys.argv[1:], at_start=True)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a policy says what not every locale can show
        sys.stdout.reconfigure(errors="backslashreplace")
    _run(settings, "commands.rollouts", "show_rollouts")


def _run(settings: CommandSettings, module: str, function: str) -> NoReturn:
    """Import a command's module only now, so that `--help` and a mistake answer at once."""
    command = import_module(f"grpo_runs.{module}")
    from grpo_runs.screen import Screen

    raise SystemExit(getattr(command, function)(settings, Screen()))


def _command(kind: type[CommandSettings], module: str, function: str) -> Callable[[], NoReturn]:
    return lambda: _run(load_settings(kind, sys.argv[1:], at_start=True), module, function)


evaluate = _command(EvalSettings, "commands.evaluate", "evaluate_models")
report = _command(ReportSettings, "commands.rollouts", "report")
sft = _command(SftSettings, "commands.sft", "train")
watch = _command(WatchSettings, "watch.serve", "watch")


def command_lines_of_services(settings: RunSettings) -> Iterator[str]:
    from grpo_runs.services import command_lines

    _require_usable_tasks(settings)
    yield "Command lines of the services. Each run chooses its own ports:"
    yield from command_lines(settings)


def _require_usable_tasks(settings: RunSettings) -> None:
    """A mistake in the user's code or data ends the command before it starts a server."""
    from grpo_runs.services import problem_of_tasks

    try:
        problem = problem_of_tasks(settings)
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    if problem:
        _refuse(settings.command.prog, problem.rstrip())


def with_config_of_resumed_run(
    command: Command, words: Sequence[str], environment: Mapping[str, str] = os.environ
) -> list[str]:
    """Add `--config` with the configuration of the run that `--resume` names."""
    named = _value_of("--resume", words) or environment.get(f"{command.env_prefix}RESUME")
    if not named or {"-h", "--help", "--version"}.intersection(words):
        return list(words)
    config = RunDirectory.of(Path(named).expanduser()).config
    if not config.is_file():  # of a trainer alone it is another directory, auto or never
        if named not in (AUTO, NEVER) and not Path(named).expanduser().is_dir():
            _refuse(command.prog, f"--resume {named}: no such directory; name that of a run")
        return list(words)
    if _value_of("--config", words):
        _refuse(
            command.prog,
            "--config: --resume reads the configuration of the run; omit --config or --resume",
        )
    return ["--config", str(config), *words]


def _value_of(option: str, words: Sequence[str]) -> str | None:
    """The last value of an option."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(option, nargs="?", dest="value")
    value: str | None = parser.parse_known_args(words)[0].value
    return value


def _refuse(prog: str, message: str) -> None:
    sys.stderr.write(f"{prog}: {message}\n")
    raise SystemExit(EXIT_USAGE)


if __name__ == "__main__":
    commands = {
        "run": run,
        "compare": compare,
        "evaluate": evaluate,
        "report": report,
        "rollouts": rollouts,
        "sft": sft,
        "watch": watch,
    }
    if named := commands.get("".join(sys.argv[1:2])):
        del sys.argv[1]
    (named or main)()
