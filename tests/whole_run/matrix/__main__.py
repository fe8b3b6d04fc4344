"""Injects every fault of the matrix into real processes, and records what happens:
`python -m tests.whole_run.matrix`.

Runs as root, or as a user who may make namespaces, in a network and a mount namespace of its own.
`--minutes` stops after so long: `--seed` then decides which faults are injected. The results are
merged into `results.json` beside this file, of which `--page` writes the tables.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

IN_NAMESPACES = "GRPO_TEST_IN_NAMESPACES"


def enter_namespaces() -> None:
    """Run this command again in namespaces of its own."""
    root = [] if os.geteuid() == 0 else ["--map-root-user"]
    words = ["unshare", *root, "--net", "--mount", "--propagation", "private", sys.executable]
    os.environ[IN_NAMESPACES] = "1"
    os.execvp(words[0], [*words, "-m", "tests.whole_run.matrix", *sys.argv[1:]])


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def inject(faults: list[Any], minutes: float | None, directory: Path) -> dict[str, dict[str, Any]]:
    """Inject one fault after the other; returns what to record of each."""
    from tests.whole_run.matrix.declared import Site

    began, found = time.monotonic(), {}
    with Site(directory) as place:
        for fault in faults:
            if minutes is not None and time.monotonic() > began + 60 * minutes:
                break
            try:
                outcome = fault.inject(place)
                is_late = outcome.seconds > fault.limit_s
                assert minutes is not None or not is_late, f"it took {outcome.seconds:.0f} s"
            except Exception:  # noqa: BLE001 - the others are injected all the same
                place.end_run()
                say(f"FAILED {fault.name}\n{traceback.format_exc()[-6000:]}")
                found[fault.name] = {"failed": True}
                continue
            say(f"{fault.name}: {outcome.happened}, {outcome.seconds:.1f} s ({outcome.error})")
            found[fault.name] = {
                "happened": outcome.happened,
                "error": outcome.error,
                "seconds": round(outcome.seconds, 1),
            }
    return found


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> None:
    parser = argparse.ArgumentParser(prog="make faults-matrix", description=__doc__)
    parser.add_argument("--only", default="", help="faults whose name matches this pattern")
    parser.add_argument("--minutes", type=float, help="begin no fault later; each may take minutes")
    parser.add_argument("--seed", default="", help="decides the order; without: as declared")
    parser.add_argument(
        "--tests", action="store_true", help="run the tests of other suites instead"
    )
    parser.add_argument("--record", action="store_true", help="merge into results.json")
    parser.add_argument("--page", type=Path, help="page whose tables are replaced")
    given = parser.parse_args()
    if not os.environ.get(IN_NAMESPACES):
        enter_namespaces()
    signal.signal(signal.SIGTERM, _interrupt)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    from tests.whole_run.matrix.matrix import chosen, record, run_tests, write_page

    with tempfile.TemporaryDirectory(prefix="grpo-faults-") as directory:
        if given.tests:
            found = run_tests(given.only, Path(directory))
        else:
            faults = chosen(given.only, given.seed)
            found = inject(faults, given.minutes, Path(directory))
    if given.record:
        record(found)
    if given.page is not None:
        write_page(given.page)
    failed = [name for name, result in found.items() if "failed" in result]
    say(f"{len(found)} faults injected, {len(failed)} failed: {'; '.join(failed) or 'none'}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
