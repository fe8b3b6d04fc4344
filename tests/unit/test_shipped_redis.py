"""Every Redis that this project starts or tells users to start keeps what it has acknowledged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from grpo_core.redis.server import APPENDFSYNC, redis_command

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
STARTS = re.compile(r"^\s*redis-server .*", re.MULTILINE)


def appendonly_and_appendfsync(words: str) -> tuple[str, ...]:
    return tuple(
        found[1] if (found := re.search(rf"--{name}[\s,]+\"?([\w$]+)", words)) else "missing"
        for name in ("appendonly", "appendfsync")
    )


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(" ".join(redis_command(1, Path("/data"), "redis-server")), id="processes"),
        pytest.param((ROOT / "containers/stack.yml").read_text(), id="compose"),
        pytest.param((ROOT / "helm/grpo/templates/redis/statefulset.yaml").read_text(), id="chart"),
        *(
            pytest.param(command, id=str(page.relative_to(ROOT)))
            for page in PAGES
            for command in STARTS.findall(page.read_text())
        ),
    ],
)
def test_redis_loses_nothing_that_it_acknowledged(words: str) -> None:
    assert appendonly_and_appendfsync(words) == ("yes", APPENDFSYNC)


def test_the_documentation_promises_the_same() -> None:
    page = (ROOT / "docs/explanation/exactly-once.md").read_text()
    assert f"| `appendfsync {APPENDFSYNC}`, wherever this project starts Redis |" in page
