"""All commands: `--help`, `--version`, `--config`, `--dry-run`; the commands of the pages
docs/how-to/modes.md parse as they stand."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from grpo_core.settings import CommandSettings, load_settings
from grpo_core.settings.options import options_of
from grpo_core.settings.sources import read_words
from grpo_core.tree.run_api import RunApiSettings
from grpo_core.tree.server import ServerSettings
from grpo_core.tree.trainer_command import CommandLine, config_yaml
from grpo_env.settings import EnvServerSettings
from grpo_runs.modes import MODES
from grpo_runs.process.ports import free_port
from grpo_runs.settings.compare import CompareSettings
from grpo_runs.settings.evaluate import EvalSettings
from grpo_runs.settings.rollouts import ReportSettings, RolloutsSettings
from grpo_runs.settings.run import DemoSettings, RunSettings
from grpo_runs.settings.sft import SftSettings
from grpo_runs.settings.watch import WatchSettings

PORTS = f"--port {free_port()} --health-port {free_port()}"
DIRECTORY = Path(__file__).parent
REDIS = "--redis-url redis://127.0.0.1:6379"
COMMANDS: dict[type[CommandSettings], list[str]] = {
    RunApiSettings: [f"--port {free_port()}"],
    ServerSettings: [f"--model m {PORTS} --dtype float32 --max-model-len=128"],
    EnvServerSettings: ["arithmetic serve --model m", "gsm8k serve --model m --weight -1"],
    CommandLine: [
        "--model m --mode shared_vllm",
        f"--model m --mode lora_only --vllm-restart-interval 4 {REDIS}",
        f"--model m --mode lora_restart --lora-layer-indices 0-3 7 {REDIS}",
        f"--model m --mode none --vllm-flags=--enforce-eager {REDIS}",
    ],
    DemoSettings: [
        "--model tiny --task arithmetic --mode lora_only --trainer.lora-layer-indices 0-1 "
        "--env.temperature=0.5 --server.enable-prefix-caching --server.no-await-weights"
    ],
    RunSettings: [f"--model m {REDIS}"],
    CompareSettings: [""],
    EvalSettings: [
        "--model m --task math,gsm8k --max-model-len 128 --greedy "
        "--env.held-out 0.5 --env.no-drop-equal-scores --server.block-size=32"
    ],
    ReportSettings: [f"{DIRECTORY}", f"{DIRECTORY} --output page.html --open"],
    WatchSettings: [f"{DIRECTORY} {DIRECTORY} --port 8765", f"{DIRECTORY} --terminal"],
    SftSettings: ["--model m --data rows --output new --columns prompt=question --lora-r 8"],
    RolloutsSettings: [],  # needs the directory of a run
}
EVERY_COMMAND = pytest.mark.parametrize(
    "kind", COMMANDS, ids=[kind.command.prog for kind in COMMANDS]
)
RAW = re.compile(r"\bnull\b|\bNone\b|list\[|SecretStr|default: \)|<class|PydanticUndefined")
"""Words of Python and pydantic that `--help` must not show."""


def printed(
    kind: type[CommandSettings], words: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> str:
    with pytest.raises(SystemExit) as ended:
        load_settings(kind, words, {})
    shown = capsys.readouterr()
    assert (ended.value.code, shown.err) == (0, "")
    return shown.out


@EVERY_COMMAND
def test_help_shows_each_option_with_its_default_in_plain_words(
    kind: type[CommandSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = printed(kind, ["--help"], capsys)
    assert not RAW.search(shown)
    for option in options_of(kind).values():
        assert option.name in shown or option.name.upper() in shown
        assert option.info.description
    assert printed(kind, ["--version"], capsys) == f"{kind.command.prog} 0.1.0\n"


OWN = pytest.mark.parametrize(
    "kind", [RunApiSettings, ServerSettings, EnvServerSettings, CommandLine]
)


@OWN
def test_options_stand_below_headings_and_examples_follow(kind: type[CommandSettings]) -> None:
    grouped = [name for names in kind.command.groups.values() for name in names]
    assert sorted([*grouped, *kind.command.positional]) == sorted(options_of(kind))
    assert 2 <= len(kind.command.examples) <= 4


@EVERY_COMMAND
def test_a_dry_run_prints_a_file_that_gives_the_same_settings(
    kind: type[CommandSettings], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for line in COMMANDS[kind]:
        words = line.split()
        file = tmp_path / "config.yaml"
        file.write_text(printed(kind, [*words, "--dry-run"], capsys))
        again = load_settings(kind, ["--config", str(file)], {})
        assert again.resolved() == load_settings(kind, words, {}).resolved()


def test_the_trainers_file_gives_its_settings(tmp_path: Path) -> None:
    for line in COMMANDS[CommandLine]:
        first = load_settings(CommandLine, line.split(), {}).settings()
        file = tmp_path / "config.yaml"
        file.write_text(config_yaml(first))
        again = load_settings(CommandLine, ["--config", str(file)], {}).settings()
        assert config_yaml(again) == file.read_text()
        assert again.sync.publish_every_steps == first.sync.publish_every_steps


def test_options_win_over_variables_and_those_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: m\nweight_bridge_mode: shared_vllm\nseed: 1\nlr: 1e-3\nsteps: 4\n")
    given = ["--config", str(file), "--seed", "3"]
    chosen = load_settings(CommandLine, given, {"GRPO_SEED": "2", "GRPO_LR": "1e-4"})
    assert (chosen.seed, chosen.lr, chosen.steps, chosen.mode) == (3, 1e-4, 4, "shared_vllm")


ARCHIVED = [
    (
        "--model-name m --weight-bridge-mode lora_only --vllm-port 9002 "
        "--atropos-url http://h:8002 --training-steps 30 --redis-url redis://h",
        "",
        ("m", "lora_only", 30, "http://h:8002", "http://127.0.0.1:9002", False),
    ),
    (
        "--model=m --weight_bridge_mode=shared_vllm --vllm_url http://v:1/v1 --training_steps=3",
        "",
        ("m", "shared_vllm", 3, "http://localhost:8000", "http://v:1", False),
    ),
    (
        "",
        "MODEL_NAME=m WEIGHT_BRIDGE_MODE=shared_vllm TRAINING_STEPS=7 VLLM_PORT=9002 "
        "BENCHMARK=true WANDB_PROJECT=",
        ("m", "shared_vllm", 7, "http://localhost:8000", "http://127.0.0.1:9002", True),
    ),
]


@pytest.mark.parametrize(("line", "variables", "expected"), ARCHIVED)
def test_the_archived_trainers_options_and_variables_are_accepted(
    line: str, variables: str, expected: tuple[object, ...]
) -> None:
    environment = dict(f"GRPO_{variable}".split("=") for variable in variables.split())
    given = load_settings(CommandLine, line.split(), environment)
    chosen = given.settings()
    services = (chosen.run_api_url, chosen.inference_url)
    assert (chosen.model, chosen.sync.mode, chosen.steps, *services, given.benchmark) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", True),
        ("--no-drop-equal-scores", False),
        ("--drop-equal-scores false", False),
        ("--env.drop_equal_scores=False", False),
        ("--drop_equal_scores", True),
        ("--env.ensure_scores_are_not_same true", True),
    ],
)
def test_a_flag_may_be_written_in_several_ways(words: str, expected: bool) -> None:
    given = ["arithmetic", *words.split(), "serve", "--model", "m"]
    assert load_settings(EnvServerSettings, given, {}).drops_equal_scores is expected


def test_grpo_run_takes_every_option_of_the_trainer() -> None:
    names = [option.name for option in options_of(CommandLine).values()]
    words = [f"--{name}=true" for name in (*names, *CommandLine.command.aliases)]
    read = read_words(RunSettings.command, options_of(RunSettings), [*words, "--vllm-port=1"])
    named = {problem.removeprefix("--").partition(":")[0] for problem in read.problems}
    assert named == {"inference-url", "weights-socket", "memory-plan", "vllm-url"}  # with a reason
    assert not [problem for problem in read.problems if "no such option" in problem]
    assert (read.values["port"].name, read.passed_on) == ("--vllm-port", [])


PAGES = Path(__file__).parents[2] / "docs" / "how-to"
BY_NAME: dict[str, type[CommandSettings]] = {
    "run-api": RunApiSettings,
    "vllm-api-server": ServerSettings,
    "env-server": EnvServerSettings,
    "grpo": CommandLine,
}


def commands(mode: str) -> list[list[str]]:
    """The blocks of code that begin with a command, in the order of the page's terminals."""
    first, *others = (PAGES / "modes.md").read_text().split("\n## ")
    (own,) = [section for section in others if section.startswith(f"{mode}\n")]
    blocks = re.findall(r"(?s)```bash\n(.*?)```", first + own)
    lines = [shlex.split(block.replace("$MODEL", "my-model")) for block in blocks]
    return [line for line in lines if line[0] in BY_NAME]


@pytest.mark.parametrize("mode", MODES)
def test_every_command_of_a_mode_parses_and_the_trainer_comes_last(mode: str) -> None:
    lines = commands(mode)
    server = [] if mode in ("lora_restart", "none") else ["vllm-api-server"]  # grpo starts it
    assert [line[0] for line in lines] == ["run-api", "env-server", *server, "grpo"]
    for name, *words in lines:
        settings = load_settings(BY_NAME[name], words, {})
    assert isinstance(settings, CommandLine)
    assert settings.mode == mode
