"""vLLM is touched in one file, so that a new version of it is met in one place."""

from __future__ import annotations

import re
from pathlib import Path

import grpo_vllm

IMPORTS_VLLM = re.compile(r"(?m)^\s*(from|import) vllm\b")


def test_only_one_module_imports_vllm() -> None:
    folder = Path(grpo_vllm.__file__).parent
    importing = {f.name for f in folder.rglob("*.py") if IMPORTS_VLLM.search(f.read_text())}
    assert importing == {"engine_internals.py"}
