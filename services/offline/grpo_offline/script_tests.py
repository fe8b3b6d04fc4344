"""Runs the tests of a script, and prints how many passed."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any


def run_tests(names: Mapping[str, Any]) -> tuple[int, int]:
    """Run all functions that begin with `test_`; returns how many passed, and their number.

    Args: names: those of the script's module
    """
    tests: list[Callable[[], None]] = [
        value for name, value in names.items() if name.startswith("test_")
    ]
    passed = 0
    for test in tests:
        try:
            test()
        except Exception:  # noqa: BLE001 any failure is a failed test
            sys.stdout.write(f"FAILED {test.__name__}\n{traceback.format_exc()}\n")
        else:
            passed += 1
            sys.stdout.write(f"passed {test.__name__}\n")
    return passed, len(tests)
