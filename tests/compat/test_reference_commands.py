"""Every command line of the archived trainer's documents is accepted, or refused with a reason."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_runs.process.ports import free_port
from tests.compat import reference_commands as reference
from tests.compat.reference_commands import NOT_OURS, commands, outcome

COMPAT = Path(__file__).parents[2] / "scripts" / "compat"
REFUSED = {
    "early:567": NOT_OURS,
    "latest:297": "--openai.server_type: expected the server type vllm, because training needs",
}
"""By place, with the beginning of the sentence."""


def test_every_command_line_is_accepted_or_refused_with_a_reason(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("REDIS_URL", "RUN_API_TOKEN", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    port = free_port()
    refused: dict[str, str] = {}
    for command in commands():
        result = outcome(command, str(tiny_model), port, dry_run=True)
        if result.refusal is not None:
            refused[command.place] = result.refusal
    assert refused.keys() == REFUSED.keys(), refused
    assert [refused[place].startswith(REFUSED[place]) for place in REFUSED]


def test_the_list_names_each_program() -> None:
    assert {command.command for command in commands()} == {*reference.PROGRAMS.values()}


ARCHIVED = {
    "example_trainer.grpo": "grpo",
    "example_trainer/grpo.py": "grpo",
    "example_trainer.run": "grpo-run",
    "example_trainer.vllm_api_server": "vllm-api-server",
    "example_trainer/vllm_api_server.py": "vllm-api-server",
    "environments/gsm8k_server.py": "env-server",
    "atroposlib.cli.run_api": "run-api",
}


@pytest.mark.parametrize("program", ARCHIVED)
def test_the_archived_names_run_our_programs(program: str) -> None:
    words = ["-m", program] if not program.endswith(".py") else [program]
    done = subprocess.run(
        [sys.executable, *words, "--version"], cwd=COMPAT, capture_output=True, text=True
    )
    assert done.stdout.startswith(f"{ARCHIVED[program]} "), done.stderr


def test_the_package_installs_the_archived_modules(tmp_path: Path) -> None:
    source, target = tmp_path / "compat", tmp_path / "installed"
    shutil.copytree(COMPAT, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run(
        [*pip, "--no-deps", "--no-build-isolation", "--target", str(target), str(source)],
        check=True,
    )
    installed = sorted(path.name for path in (target / "example_trainer").glob("*.py"))
    assert installed == ["__init__.py", "grpo.py", "run.py", "vllm_api_server.py"]
    assert not (target / "atroposlib").exists()
