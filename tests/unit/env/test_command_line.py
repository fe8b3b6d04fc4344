"""`env-server` as a process: its imports and its exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests.support.canned import inference_routes
from tests.support.http_stub import Answer, stub_server
from tests.support.wait import DEADLINE_S
from tests.unit.env.feeding import RunApi

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
