"""The chart accepts the values that its documentation page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.chart.rendering import ROOT, template

PAGE = (ROOT / "docs/how-to/kubernetes.md").read_text()
ON_EVERY_NODE = ("--set", "image.pullPolicy=Never")
PLACEHOLDER = re.compile(r"<[^>\n]*>")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def values_files() -> list[str]:
    return [block for block in blocks("yaml") if not block.startswith("apiVersion:")]


def settings() -> set[str]:
    """Values of commands, and values with an equals sign in the text."""
    commands = re.findall(r"--set (\S+=\S+)", PLACEHOLDER.sub("x", "\n".join(blocks("bash"))))
    text = re.findall(r"`([a-z]\w*(?:\.\w+)*=[^`\n]*)`", PLACEHOLDER.sub("x", PAGE))
    return {*commands, *text}


@pytest.mark.parametrize("number", range(len(values_files())))
def test_a_values_file_is_accepted(number: int, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(values_files()[number])
    done = template("--values", str(file), *ON_EVERY_NODE)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("setting", sorted(settings()))
def test_the_schema_accepts_a_setting(setting: str) -> None:
    """Alone it may be refused by the rules, which name values that it needs beside it."""
    stderr = template("--set", setting, *ON_EVERY_NODE).stderr
    assert "schema" not in stderr, stderr
