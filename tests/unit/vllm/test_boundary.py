"""vLLM and Redis are touched in one file each, so that changes of theirs are met in one place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import grpo_vllm


@pytest.mark.parametrize(
    ("package", "module"), [("vllm", "engine_internals.py"), ("redis", "served_record.py")]
)
def test_only_one_module_imports_it(package: str, module: str) -> None:
    imports = re.compile(rf"(?m)^\s*(from|import) {package}\b")
    folder = Path(grpo_vllm.__file__).parent
    assert {f.name for f in folder.rglob("*.py") if imports.search(f.read_text())} == {module}
