"""run-api beside the API server of atroposlib 0.4.0: `python -m benchmarks.run_api`.

Both run alone, one after the other, on this machine. Runs are interleaved, so that what else
the machine does meets both.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime

import structlog

from benchmarks.run_api_bench import (
    crowd,
    first_batch,
    fsync,
    machine,
    memory,
    minimums,
    stalls,
    status_env,
    submissions,
)
from benchmarks.run_api_bench.report import Results, scenario_section
from benchmarks.run_api_bench.results_file import replace_section
from benchmarks.run_api_bench.scenario import Rig, Scenario
from benchmarks.run_api_bench.settings import BenchSettings
from benchmarks.run_api_bench.systems import SYSTEMS
from benchmarks.run_api_bench.workload import Workload
from grpo_core.logs import configure_logging
from grpo_core.settings import load_settings

SECTION = "run-api"
SCENARIOS = (
    submissions.SCENARIO,
    crowd.SCENARIO,
    status_env.SCENARIO,
    first_batch.SCENARIO,
    memory.SCENARIO,
    stalls.SCENARIO,
    minimums.SCENARIO,
)
_log = structlog.get_logger()


def main() -> None:
    settings = load_settings(BenchSettings, sys.argv[1:])
    configure_logging("bench-run-api")
    if settings.fsync:
        _compare_fsync(settings)
        return
    scenarios = [scenario for scenario in SCENARIOS if scenario.name in settings.scenarios]
    section = _section(settings, scenarios, measure(settings, scenarios))
    sys.stdout.write("\n".join([*section, ""]))
    if settings.is_complete:
        replace_section(settings.results, SECTION, section)


def _compare_fsync(settings: BenchSettings) -> None:
    host = machine.host()
    turns = fsync.measure(settings.sizes(), settings.effective_runs)
    section = [
        f'`make bench-run-api BENCH_FLAGS="--fsync --runs {len(turns)}"` on {_today()}: groups as '
        "under *Submitting groups*, a batch of 64 sequences; median (lowest to highest). Both ran "
        "in turn, and a ratio is of one turn, so that what else the machine does meets both: the "
        "load average before the first turn says how much that was.",
        "",
        *(f"- {fact}" for fact in host),
        "",
        *fsync.report(turns),
    ]
    sys.stdout.write("\n".join([*section, ""]))
    if not settings.quick:
        replace_section(settings.results, fsync.SECTION, section)


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def measure(settings: BenchSettings, scenarios: Sequence[Scenario]) -> Results:
    """Every scenario on every system, `settings.runs` times (once with `--quick`)."""
    sizes = settings.sizes()
    workload = Workload(sizes)
    results = Results()
    for run in range(1, settings.effective_runs + 1):
        for scenario in scenarios:
            for system in SYSTEMS:
                if system.name in settings.systems:
                    _log.info("measuring", run=run, scenario=scenario.name, system=system.name)
                    readings = scenario.measure(Rig(system, sizes, workload))
                    results.add(scenario, system.name, readings)
    return results


def _section(settings: BenchSettings, scenarios: Sequence[Scenario], results: Results) -> list[str]:
    tables = [line for scenario in scenarios for line in (*scenario_section(scenario, results), "")]
    return [*_introduction(settings.effective_runs), "", *tables]


def _introduction(runs: int) -> list[str]:
    counted = "one run" if runs == 1 else f"{runs} runs: median (lowest to highest)"
    return [
        f"`make bench-run-api` on {_today()}, {counted}. Both servers "
        "ran alone, one after the other, with one process that sends and one that probes beside "
        "them. *ratio* is run-api over atroposlib.",
        "",
        *(f"- {fact}" for fact in machine.description()),
    ]


if __name__ == "__main__":
    main()
