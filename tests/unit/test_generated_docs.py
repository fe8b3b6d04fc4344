"""Parts of the documentation that are generated: what is filled in, and what is refused."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from docs.generate import __main__ as generate
from docs.generate import chart
from docs.generate.source import NoDocstring, summary


def test_only_the_marked_part_of_a_page_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "PARTS", {"shout": str.upper})
    page = "# A\n<!-- generated: shout word -->\nold\n<!-- end of generated part -->\nafter\n"
    filled = generate.filled(page)
    assert "\nWORD\n" in filled
    assert "old" not in filled
    assert filled.startswith("# A\n")
    assert filled.endswith("\nafter\n")
    assert generate.filled(filled) == filled


def test_a_check_names_the_page_that_is_out_of_date_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(generate, "PAGES", tmp_path)
    monkeypatch.setattr(generate, "PARTS", {"shout": str.upper})
    page = tmp_path / "page.md"
    page.write_text("<!-- generated: shout word -->\n<!-- end of generated part -->\n")
    before = page.read_text()
    with pytest.raises(SystemExit, match=r"page\.md; run `make docs`"):
        generate.main(["--check"])
    assert page.read_text() == before
    generate.main([])
    generate.main(["--check"])


def test_a_missing_docstring_is_named() -> None:
    with pytest.raises(NoDocstring, match="grpo_x: write a docstring"):
        summary(ast.parse("x = 1"), "grpo_x")


def test_a_value_of_the_chart_has_its_default_and_the_whole_comment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "values.yaml"
    monkeypatch.setattr(chart, "_FILE", file)
    file.write_text(
        "# About the file.\n\n# -- Weights:\n# `a` or `b`.\nmode: a\n"
        'redis:\n  # -- Disk.\n  size: 8Gi\n  url:\n    # -- Key. Empty: none.\n    key: ""\n'
        "  # -- Limits.\n  resources: {cpu: 1}\n"
    )
    lines = chart.values().splitlines()
    assert "| `mode` | `a` | Weights: `a` or `b`. |" in lines
    assert "| `redis.url.key` | empty | Key. Empty: none. |" in lines
    assert "| `redis.resources` | `{cpu: 1}` | Limits. |" in lines
    assert lines.index("## redis") < lines.index("| `redis.size` | `8Gi` | Disk. |")
    file.write_text("# No dashes.\nmode: a\n")
    with pytest.raises(NoDocstring, match="mode has no comment"):
        chart.values()
