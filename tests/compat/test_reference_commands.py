"""Every command line of the archived trainer's documents is accepted, or refused with a reason."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from grpo_core.settings import load_settings
from grpo_core.tree.trainer_command import CommandLine
from grpo_runs.process.ports import free_port
from tests.compat import reference_commands as reference
from tests.compat.reference_commands import NOT_OURS, commands, outcome
from tests.compat.test_reference_runs import ADAPTER, SESSIONS

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


def settings_of(command: reference.Command, model: str) -> Any:
    words = [*command.arguments]
    port = int(words[words.index("--port") + 1]) if "--port" in words else 0
    kind = reference.KINDS[command.command]
    found = load_settings(kind, command.for_ours(model, port), command.environment)
    return found.settings() if isinstance(found, CommandLine) else found


@pytest.mark.parametrize("session", SESSIONS)
def test_the_programs_of_a_session_find_each_other(session: str, tiny_model: Path) -> None:
    """`test_reference_runs.py` runs the sessions."""
    lines, exported = SESSIONS[session]
    typed = {command.place: command for command in commands()}
    session_commands = [typed[f"{session.split()[0]}:{line}"] for line in lines]
    found = {each.command: settings_of(each, str(tiny_model)) for each in session_commands}
    run_api, environment = found[reference.RUN_API], found[reference.ENVIRONMENT]
    assert environment.run_api_url == f"http://localhost:{run_api.port}"
    for trains in found.keys() & {reference.GRPO, reference.GRPO_RUN}:
        trainer = found[trains]
        assert trainer.run_api_url == environment.run_api_url
        assert trainer.redis_url == run_api.redis_url
        assert httpx.URL(environment.inference_url[0]).port == httpx.URL(trainer.inference_url).port
    if reference.SERVER in found:
        server = found[reference.SERVER]
        assert trainer.inference_url == server.advertise_url
        assert server.redis_url == run_api.redis_url
        assert server.enable_lora == (exported == ADAPTER)


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
def test_the_archived_names_run_our_programs(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [program, "--version"])
    monkeypatch.syspath_prepend(COMPAT)
    module = program.removesuffix(".py").replace("/", ".")
    with pytest.raises(SystemExit):
        runpy.run_module(module, run_name="__main__")
    assert capsys.readouterr().out.startswith(f"{ARCHIVED[program]} ")


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
