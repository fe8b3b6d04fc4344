"""The matrix of faults names each fault once, tests that exist, and what was measured."""

from __future__ import annotations

from pathlib import Path

from tests.whole_run.matrix.matrix import FAULTS, sections

ROOT = Path(__file__).parents[2]


def test_each_fault_has_a_name_of_its_own_and_tests_that_exist() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(names) == len(set(names))
    for test in (test for fault in FAULTS for test in fault.tests):
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), test


def test_the_page_shows_the_recorded_results() -> None:
    page = (ROOT / "docs/explanation/faults.md").read_text()
    for name, lines in sections():
        shown = page.partition(f"\n## {name}\n\n")[2].partition("\n\n## ")[0].splitlines()
        assert shown == lines, f"{name}: run make faults-matrix MATRIX_FLAGS='--minutes 0 --page …'"
