"""The commands of the pages docs/how-to/mode-*.md are complete: each one parses as it stands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from grpo_api.settings import RunApiSettings
from grpo_core.settings import CommandSettings, load_settings
from grpo_env.settings import EnvServerSettings
from grpo_local.modes import MODES
from grpo_trainer.config.cli import CommandLine
from grpo_vllm.settings import ServerSettings

PAGES = Path(__file__).parents[2] / "docs" / "how-to"
COMMANDS: dict[str, type[CommandSettings]] = {
    "run-api": RunApiSettings,
    "vllm-api-server": ServerSettings,
    "env-server": EnvServerSettings,
    "grpo": CommandLine,
}


def commands(mode: str) -> list[list[str]]:
    """The blocks of code that begin with a command, in the order of the page's terminals."""
    page = (PAGES / f"mode-{mode.replace('_', '-')}.md").read_text()
    blocks = re.findall(r"(?s)```bash\n(.*?)```", page)
    lines = [shlex.split(block.replace("$MODEL", "my-model")) for block in blocks]
    return [line for line in lines if line[0] in COMMANDS]


@pytest.mark.parametrize("mode", MODES)
def test_every_command_of_a_mode_parses_and_the_trainer_comes_last(mode: str) -> None:
    lines = commands(mode)
    server = [] if MODES[mode].restarts_engine else ["vllm-api-server"]
    assert [line[0] for line in lines] == ["run-api", *server, "env-server", "grpo"]
    for name, *words in lines:
        settings = load_settings(COMMANDS[name], words, {})
    assert isinstance(settings, CommandLine)
    assert settings.mode == mode
