"""`env-server`: its settings, and as a process its imports and its exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from grpo_core.security import plain
from grpo_env.settings import EnvServerSettings, load_env_settings
from tests.support.canned import inference_routes
from tests.support.http_stub import Answer, stub_server
from tests.support.wait import DEADLINE_S
from tests.unit.conftest import Refused
from tests.unit.env.feeding import RunApi

BASE = ["arithmetic", "serve", "--openai.model-name", "m"]


def from_file(
    tmp_path: Path, content: str, *arguments: str, task: str = "gsm8k"
) -> EnvServerSettings:
    file = tmp_path / "env.yaml"
    file.write_text(content)
    return load_env_settings([task, "serve", "--config", str(file), *arguments])


def test_a_list_of_servers_is_one_policy_on_each_of_them(tmp_path: Path) -> None:
    one, two = ({"model_name": "m", "base_url": f"http://{name}:9001/v1"} for name in ("a", "b"))
    settings = from_file(tmp_path, json.dumps({"openai": [one, two, one]}))
    assert (settings.model, settings.inference_url) == ("m", ("http://a:9001", "http://b:9001"))


def test_the_program_of_a_container_is_not_looked_up_on_this_machine(refused: Refused) -> None:
    agent = ["agent", "serve", "--model", "m", "--reward", "gsm8k", "--command", "gone.sh"]
    told = refused(load_env_settings, [*agent, "--sandbox", "docker:no-such-image"])
    assert "docker" in told
    assert "gone.sh" not in told


def test_a_script_of_a_command_that_is_not_there_is_named(refused: Refused) -> None:
    agent = ["agent", "serve", "--sandbox", "none", "--model", "m", "--reward", "gsm8k"]
    words = [*agent, "--command", "python gone.py"]
    assert "--command: no such file: gone.py" in refused(load_env_settings, words)


BROKEN_FILES = {
    "openai: [{model_name: m}, {model_name: n}]": "differ in model_name",
    "openai: [{model_name: m, base_url: 'http://a'}, {model_name: m}]": "no base_url",
    "- a list": "expected lines such as",
    "env: {grp: 3}\nopenai: {model_name: m}": "grp",
}


def test_a_file_that_is_broken_or_names_several_policies_is_refused(
    tmp_path: Path, refused: Refused
) -> None:
    for content, problem in BROKEN_FILES.items():
        assert problem in refused(from_file, tmp_path, content)


ATROPOS = """
env: {group_size: 4, total_steps: 120, batch_size: 64, start_tok_length: 8192, use_wandb: true,
  inference_weight: -1, ensure_scores_are_not_same: false,
  max_num_workers_per_node: 24}
openai:
  - {base_url: "http://localhost:9001/v1", model_name: m, api_key: x, num_requests_for_eval: 8}
slurm: false
"""


def test_the_words_of_atropos_are_understood_and_the_command_line_wins_over_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = from_file(tmp_path, ATROPOS, "--env.group_size", "6")

    assert (settings.group_size, settings.steps, settings.max_concurrent_groups) == (6, 120, 24)
    assert (settings.drop_equal_scores, settings.weight) == (False, -1)
    # By default the tokenizer is the model's, and the name is the task's.
    assert (settings.tokenizer_name, settings.display_name) == ("m", "gsm8k")
    assert "no effect: env.batch_size, openai.api_key" in capsys.readouterr().err


MATH_ZERO = """
env: {tokenizer_name: t, rollout_server_url: "http://localhost:8002", max_token_length: 8192,
  start_tok_length: 8192, group_size: 8, batch_size: 64, total_steps: 120, steps_per_eval: 20,
  use_wandb: false, wandb_name: math-zero-lora-env, eval_limit_ratio: 0.1,
  max_num_workers_per_node: 24, mask_too_long_completions: true, eval_handling: limit_train}
openai: {base_url: "http://localhost:9002/v1", model_name: m, server_type: vllm, api_key: x,
  num_requests_for_eval: 256, weight: 1.0}
"""


def test_every_key_of_the_archived_math_configurations_works(tmp_path: Path) -> None:
    settings = from_file(tmp_path, MATH_ZERO, task="math")
    assert (settings.seq_len, settings.start_completion_tokens) == (8192, 8192)
    evaluation = (settings.eval_every, settings.eval_limit_ratio, settings.eval_requests)
    assert evaluation == (20, 0.1, 256)
    assert (settings.eval_handling, settings.mask_too_long_completions) == ("LIMIT_TRAIN", True)
    assert (settings.max_concurrent_groups, settings.steps, settings.tokenizer) == (24, 120, "t")
    assert settings.inference_url == ("http://localhost:9002",)
    shared = MATH_ZERO.partition("openai")[0]  # math_zero_shared.yaml has no such section
    assert from_file(tmp_path, shared, task="math").tokenizer_name == "t"


SECTIONS = """
model: m
columns: {prompt: q}
env: {reward_weights: {accuracy: 2, overlong: 5e-1}}
mixture:
  - {task: gsm8k, weight: 0.7, data: there}
  - {task: arithmetic, weight: 0.3, task_args: {level: 2}}
"""


def test_named_values_are_sections_of_a_file_or_words_of_a_command_line(
    tmp_path: Path, refused: Refused
) -> None:
    settings = from_file(tmp_path, SECTIONS, task="mixture")
    assert settings.columns == {"prompt": "q"}
    assert settings.reward_weights == {"accuracy": 2.0, "overlong": 0.5}
    parts = [(part.task, part.weight, part.data) for part in settings.mixture]
    assert parts == [("gsm8k", 0.7, "there"), ("arithmetic", 0.3, None)]
    assert settings.mixture[1].task_args == {"level": 2}
    words = ["mixture", "serve", "--model=m", "--mixture=gsm8k=2,arithmetic=1"]
    assert [p.weight for p in load_env_settings(words).mixture] == [2.0, 1.0]
    assert "--mixture" in refused(load_env_settings, ["mixture", "serve", "--model=m"])
    assert "expected a number" in refused(load_env_settings, [*BASE, "--reward-weights=a=x"])


@pytest.mark.parametrize("words", ["check gsm8k", "gsm8k check", "--task=gsm8k check"])
def test_task_and_action_may_stand_in_any_order(words: str) -> None:
    settings = load_env_settings([*words.split(), "--model=m"])
    assert (settings.task, settings.action) == ("gsm8k", "check")


def test_only_the_token_of_run_api_is_read_from_the_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ENV", "production")
    monkeypatch.setenv("TASK", "other")
    monkeypatch.setenv("RUN_API_TOKEN", "a-secret")
    assert plain(load_env_settings(BASE).run_api_token) == "a-secret"


_RUN_EACH = """
import json, sys
from grpo_env.__main__ import main
for arguments in json.loads(sys.argv[1]):
    try:
        main(arguments)
    except SystemExit as end:
        heavy = [name for name in ("torch", "torch.nn", "transformers") if sys.modules.get(name)]
        print(json.dumps([end.code, heavy]))
"""


def run_each(*command_lines: list[str], **environment: str) -> tuple[list[Any], str]:
    """Run all command lines in one process. Returns for each its status and the modules imported so
    far, and stderr."""
    ended = subprocess.run(
        [sys.executable, "-c", _RUN_EACH, json.dumps(command_lines)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in ended.stdout.splitlines() if line[0] == "["], ended.stderr


def test_mistakes_import_nothing_heavy_and_no_environment_imports_torch(
    tokenizer_dir: Path, hub_layout: Path, tmp_path: Path
) -> None:
    """The last command line has loaded the tokenizer, read the data (with datasets, which tries to
    import torch) and queried the server when it connects to run-api."""
    serve = ["arithmetic", "serve", "--openai.model-name", "none/model"]
    with stub_server(inference_routes(lambda _body: (500, {}))) as inference:
        ends, errors = run_each(
            [*serve, "--env.group_size", "x"],
            [*serve, "--no-such-option"],
            serve,
            [
                *("gsm8k", "serve", f"--env.data={hub_layout}"),
                *(f"--openai.base-url={inference.url}", f"--openai.model-name={tokenizer_dir}"),
                *("--env.rollout-server-url=http://127.0.0.1:9", "--env.run-api-deadline-s=0.1"),
            ],
            HF_HOME=str(tmp_path),
            HF_HUB_OFFLINE="1",
        )

    assert ends == [[2, []], [2, []], [1, ["transformers"]], [1, ["transformers"]]]
    assert "env-server: TokenizerUnusable: " in errors
    assert "not reachable" in errors
    assert "PyTorch was not found" not in errors
    assert "Traceback" not in errors


def test_sigterm_during_generation_ends_politely_and_takes_the_ready_file_along(
    tokenizer_dir: Path, tmp_path: Path
) -> None:
    ready = tmp_path / "ready"
    api, generating, release = RunApi(num_steps=1000), threading.Event(), threading.Event()

    def generate(_body: dict[str, Any]) -> Answer:
        generating.set()
        release.wait()
        return 500, {}

    with stub_server(api.routes()) as run_api, stub_server(inference_routes(generate)) as inference:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "grpo_env", "arithmetic", "serve", "--env.group-size=2"),
                f"--env.rollout-server-url={run_api.url}",
                f"--openai.base-url={inference.url}",
                *(f"--openai.model-name={tokenizer_dir}", f"--env.ready-file={ready}"),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert generating.wait(DEADLINE_S)
            assert ready.exists()
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=DEADLINE_S)
        finally:
            release.set()
            process.kill()
            process.wait()
    assert process.returncode == 0
    assert "environment.stopped" in errors
    assert api.disconnected == [0]
    assert not ready.exists()
