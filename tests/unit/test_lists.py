"""Lists that are kept by hand are complete: in the documentation, and in tests/gpu/run.sh. Every
file and name in the walk through the code exists. Parts of the documentation are generated."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from docs.generate import __main__ as generate
from docs.generate import chart
from docs.generate.source import NoDocstring, summary
from grpo_trainer.errors import UnusableReason

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / "README.md", ROOT / ".github/CONTRIBUTING.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def make_targets(page: str) -> list[str]:
    """In backticks, and at the beginning of a line in a block of code."""
    blocks = "".join(re.findall(r"(?s)^```.*?^```", page, re.MULTILINE))
    return re.findall(r"`make ([a-z-]+)", page) + re.findall(r"(?m)^make ([a-z-]+)", blocks)


def test_every_make_target_that_a_page_names_exists() -> None:
    makefile = "".join(file.read_text() for file in (ROOT / "Makefile", *ROOT.glob("*/*.mk")))
    pages = [page for page in PAGES if page.name != "benchmarks.md"]  # records of past commands
    named = {(target, page.name) for page in pages for target in make_targets(page.read_text())}
    assert {("demo", "README.md"), ("test", "README.md")} <= named
    for target, page in named:
        assert re.search(rf"(?m)^[a-z0-9 -]*(?<!-)\b{target}\b(?!-)[a-z0-9 -]*:", makefile), page


def test_every_gpu_test_belongs_to_a_part_and_every_part_names_tests_that_exist() -> None:
    text = (ROOT / "tests/gpu/run.sh").read_text()
    for name, value in re.findall(r"(?m)^(\w+)=(tests/\S+)$", text):
        text = text.replace(f"${name}", value)
    named = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", text)
    for file, test in named:
        assert test == "" or f"def {test}(" in (ROOT / file).read_text(), f"{file}::{test}"
    present = {str(path.relative_to(ROOT)) for path in (ROOT / "tests/gpu").glob("test_*.py")}
    assert present <= {file for file, _ in named}


def test_every_test_that_a_page_names_exists() -> None:
    present = {path.name for path in (ROOT / "tests").rglob("*.py")}
    named = {
        (Path(file).name, page.name)
        for page in PAGES
        for file in re.findall(r"\b((?:\w+/)*test_\w+\.py)\b", page.read_text())
    }
    assert {(file, page) for file, page in named if file not in present} == set()


def test_every_command_has_a_page() -> None:
    commands = {
        name
        for project in ROOT.glob("services/*/pyproject.toml")
        for name in tomllib.loads(project.read_text()).get("project", {}).get("scripts", {})
        if not name.startswith("atropos-")  # other names of grpo and grpo-run
    }
    pages = {page.stem for page in (ROOT / "docs/reference/commands").glob("*.md")}
    assert pages == commands | {"index"}


@pytest.mark.parametrize("name", ["README.md", ".github/CONTRIBUTING.md", "AGENTS.md"])
def test_links_out_of_the_site_lead_somewhere(name: str) -> None:
    """mkdocs checks those between the pages below docs/."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / name).read_text()):
        assert ((ROOT / name).parent / target).exists(), target


def test_the_code_map_names_every_directory() -> None:
    page = (ROOT / "docs/contributing/code-map.md").read_text()
    command = ["git", "ls-files", "[!.]*/*"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    directories = {file.split("/")[0] + "/" for file in files.splitlines()}
    assert {one for one in directories if one not in page} == set()


def test_citation_and_changelog_name_the_version_of_the_packages() -> None:
    version = (ROOT / "shared/grpo_core/VERSION").read_text().strip()
    assert f"\nversion: {version}\n" in (ROOT / "docs/CITATION.cff").read_text()
    assert f"\n## [{version}]" in (ROOT / "docs/changelog.md").read_text()


def test_the_page_of_checks_names_every_reason() -> None:
    page = (ROOT / "docs/explanation/checks.md").read_text()
    named = re.findall(r"(?m)^\| `(\w+)` \|", page)
    assert sorted(set(named) & {*UnusableReason}) == sorted(UnusableReason)


def test_every_link_leads_somewhere() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    links = [line.split("\t")[1] for line in listed if line.startswith("120000")]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


PAGE = (ROOT / "docs/explanation/architecture.md").read_text()
ENTRIES = re.findall(r"(?m)^\d+\. `([^`]+\.py)` → `([^`]+)` →", PAGE)


def test_the_walk_opens_27_files() -> None:
    assert [len(ENTRIES), len({file for file, _ in ENTRIES[:27]})] == [32, 27]


@pytest.mark.parametrize(("file", "name"), ENTRIES)
def test_the_entry_exists(file: str, name: str) -> None:
    scope: list[ast.stmt] = ast.parse((ROOT / file).read_text()).body
    for part in name.split("."):
        found = [
            node
            for node in scope
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name == part
        ]
        assert found, f"{file} has no {name}"
        scope = found[0].body


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
