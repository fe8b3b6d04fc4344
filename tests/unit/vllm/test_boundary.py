"""vLLM and Redis are touched in few files, so that changes of theirs are met in one place."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import grpo_vllm


@pytest.mark.parametrize(
    ("package", "modules"),
    [
        ("vllm", {"engine_internals.py"}),
        ("redis", {"served_record.py", "command_stream.py"}),
    ],
)
def test_nothing_else_imports_it(package: str, modules: set[str]) -> None:
    imports = re.compile(rf"(?m)^\s*(from|import) {package}\b")
    folder = Path(grpo_vllm.__file__).parent
    assert {f.name for f in folder.rglob("*.py") if imports.search(f.read_text())} == modules


def test_the_supervisor_imports_neither_vllm_nor_torch() -> None:
    """It must live while the engine dies, and start in a second."""
    code = (
        "import sys, grpo_vllm.__main__, grpo_vllm.supervisor.run; "
        "sys.exit(bool({'vllm', 'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
