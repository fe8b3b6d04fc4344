"""`env-server` as a process: what it imports, and how it ends."""

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

from tests.unit.env.canned import inference_routes
from tests.unit.env.http_stub import Answer, stub_server
from tests.unit.env.scripted_run_api import RunApi

_REPORT_IMPORTS = """
import json, sys
from grpo_env.__main__ import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    heavy = [name for name in ("torch", "transformers") if sys.modules.get(name)]
    print(json.dumps({"status": end.code, "heavy": heavy}))
"""


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--help"], 0),
        (["arithmetic", "serve"], 2),
        (["arithmetic", "serve", "--openai.model-name", "m", "--env.group_size", "x"], 2),
        (["arithmetic", "serve", "--openai.model-name", "m", "--no-such-option"], 2),
    ],
)
def test_help_and_mistakes_import_nothing_heavy(arguments: list[str], status: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _REPORT_IMPORTS, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )

    assert json.loads(ended.stdout.splitlines()[-1]) == {"status": status, "heavy": []}


@pytest.mark.parametrize("task", ["arithmetic", "gsm8k"])
def test_no_environment_imports_torch(
    task: str, tokenizer_dir: Path, hub_layout: Path, tmp_path: Path
) -> None:
    """The tokenizer has been loaded, the data been read (with datasets, which asks for torch by
    itself) and the server been asked once run-api is looked for."""
    data = ["--env.data", str(hub_layout)] if task == "gsm8k" else []
    with stub_server(inference_routes(lambda _body: (500, {}))) as inference:
        ended = subprocess.run(
            [
                *(sys.executable, "-c", _REPORT_IMPORTS, task, "serve", *data),
                f"--openai.base-url={inference.url}",
                f"--openai.model-name={tokenizer_dir}",
                *("--env.rollout-server-url=http://127.0.0.1:9", "--env.run-api-deadline-s=0.1"),
            ],
            env=os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )

    assert json.loads(ended.stdout.splitlines()[-1]) == {"status": 1, "heavy": ["transformers"]}
    assert "not reachable" in ended.stderr
    assert "PyTorch was not found" not in ended.stderr


def test_a_missing_tokenizer_is_one_named_line_and_status_1() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "grpo_env", "arithmetic", "serve", "--openai.model-name", "/none"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert "env-server: TokenizerUnusable: " in ended.stderr.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_generation_ends_politely(
    number: signal.Signals, tokenizer_dir: Path
) -> None:
    api, generating, release = RunApi(num_steps=1000), threading.Event(), threading.Event()

    def generate(_body: dict[str, Any]) -> Answer:
        generating.set()
        release.wait(600)
        return 500, {}

    with (
        stub_server(api.routes()) as run_api,
        stub_server(inference_routes(generate)) as inference,
    ):
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "grpo_env", "arithmetic", "serve"),
                "--env.group-size=2",
                f"--env.rollout-server-url={run_api.url}",
                f"--openai.base-url={inference.url}",
                f"--openai.model-name={tokenizer_dir}",
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert generating.wait(300)
            process.send_signal(number)
            _, errors = process.communicate(timeout=120)
        finally:
            release.set()
            process.kill()
            process.wait()
    assert process.returncode == 0
    assert "stopped by a signal" in errors
    assert api.disconnected == [0]
