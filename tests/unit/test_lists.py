"""Lists that are kept by hand are complete: in the documentation, and in tests/gpu/run.sh."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from grpo_trainer.errors import UnusableReason

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def make_targets(page: str) -> list[str]:
    """In backticks, and at the beginning of a line in a block of code."""
    blocks = "".join(re.findall(r"(?s)^```.*?^```", page, re.MULTILINE))
    return re.findall(r"`make ([a-z-]+)", page) + re.findall(r"(?m)^make ([a-z-]+)", blocks)


def test_every_make_target_that_a_page_names_exists() -> None:
    makefile = "".join(file.read_text() for file in (ROOT / "Makefile", *ROOT.glob("*/*.mk")))
    named = {(target, page.name) for page in PAGES for target in make_targets(page.read_text())}
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


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "AGENTS.md"])
def test_links_out_of_the_site_lead_somewhere(name: str) -> None:
    """mkdocs checks those between the pages below docs/."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / name).read_text()):
        assert (ROOT / target).exists(), target


def test_citation_and_changelog_name_the_version_of_the_packages() -> None:
    version = (ROOT / "shared/grpo_core/VERSION").read_text().strip()
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


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
