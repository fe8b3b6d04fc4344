"""What environments cost: `python -m benchmarks.environment`.

Memory and CPU time of many rollouts in flight, the environment's share of all CPU time of a run,
and what recording rollouts adds to a training step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime
from math import log2
from pathlib import Path
from statistics import median
from typing import ClassVar

from pydantic import Field

from benchmarks.environment_bench.cpu_share import SERVICES, cpu_shares
from benchmarks.environment_bench.in_flight import KINDS, TURNS, Kind, measure
from benchmarks.run_api_bench import machine
from benchmarks.run_api_bench.report import table
from benchmarks.run_api_bench.results_file import replace_section
from benchmarks.train_bench.demo import demo_records
from benchmarks.train_bench.turns import Reading, in_turn, json_of, spread, values
from grpo_core.logs import configure_logging
from grpo_core.settings import Command, CommandSettings, load_settings

SECTION = "environment"
ROLLOUTS = (500, 1000, 2000)
MOST_MIB = 1024
MOST_EXPONENT = 1.1
"""Memory grows like a power of the number of rollouts; 1 is linear."""
MOST_SHARE = 10
MOST_RECORDING = 2
WARM_UP_STEPS = 10
KEPT = 500


class EnvironmentBenchSettings(CommandSettings):
    """Measure memory and CPU time of environments, and the cost of recording rollouts."""

    command: ClassVar[Command] = Command(prog="bench-environment", env_prefix="BENCH_ENVIRONMENT_")

    rounds: int = Field(3, ge=1, description="Times that each side is measured")
    steps: int = Field(100, ge=30, description="Training steps of each run")
    results: Path | None = Field(None, description="Markdown file whose section is replaced")


def main() -> None:
    settings = load_settings(EnvironmentBenchSettings, sys.argv[1:])
    configure_logging("bench-environment")
    lines = [
        f"`make bench-environment` on {datetime.now(UTC).date().isoformat()}, {settings.rounds} "
        "runs in turn: median (lowest to highest).",
        "",
        *(f"- {fact}" for fact in machine.host()),
    ]
    for part in (in_flight, shares, recording):
        lines += ["", *part(settings)]
    sys.stdout.write("\n".join([*lines, ""]))
    if settings.results:
        replace_section(settings.results, SECTION, lines)


def in_flight(settings: EnvironmentBenchSettings) -> list[str]:
    rows = [["", "rollouts", "memory, all in flight", "highest memory", "CPU time per rollout"]]
    growth = []
    for kind in KINDS:
        sides = {str(count): _in_flight(kind, count) for count in ROLLOUTS}
        found = in_turn(kind, settings.rounds, sides)
        for count, readings in found.items():
            cells = [spread(values(readings, key)) for key in ("held_mib", "peak_mib", "cpu_ms")]
            rows.append([kind, f"{int(count):,}", *cells])
        growth.append(_growth(kind, found))
    return [
        "### Rollouts in flight",
        "",
        "One process with all rollouts in flight at once, in groups of 4, on a server that holds "
        "its answers: a completion of 128 tokens for each prompt of about 200, or "
        f"{TURNS} of them in a conversation. Memory is resident memory in MiB, CPU time is in ms.",
        "",
        *table(rows),
        "",
        *growth,
    ]


def _in_flight(kind: Kind, count: int) -> Callable[[], Reading]:
    return lambda: measure(kind, count)


def _growth(kind: Kind, found: dict[str, list[Reading]]) -> str:
    peaks = [median(values(found[str(count)], "peak_mib")) for count in ROLLOUTS]
    before = median(r["before_mib"] for readings in found.values() for r in readings)
    exponent = log2((peaks[-1] - before) / (peaks[0] - before)) / log2(ROLLOUTS[-1] / ROLLOUTS[0])
    each_kib = (peaks[-1] - peaks[0]) / (ROLLOUTS[-1] - ROLLOUTS[0]) * 1024
    return (
        f"- {kind}: highest memory of {ROLLOUTS[-1]:,} {peaks[-1]:,.0f} MiB (goal at most "
        f"{MOST_MIB:,}: {_met(peaks[-1], MOST_MIB)}), {each_kib:.0f} KiB for each rollout beside "
        f"{before:.0f} MiB; growth exponent {exponent:.2f} (goal at most {MOST_EXPONENT}: "
        f"{_met(exponent, MOST_EXPONENT)})"
    )


def shares(settings: EnvironmentBenchSettings) -> list[str]:
    found = in_turn("cpu", settings.rounds, {"demo": lambda: cpu_shares(settings.steps)})["demo"]
    share = median(values(found, "environment"))
    names = [*dict.fromkeys(SERVICES.values()), "runner and Redis"]
    rows = [["share of all CPU time, %", ""]]
    rows += [[name, spread(values(found, name))] for name in names]
    rows += [
        ["environment, ms per step", spread(values(found, "env_ms"))],
        ["all, ms per step", spread(values(found, "all_ms"))],
        ["steps per second", spread(values(found, "steps_per_s"))],
        ["load average at the end", spread(values(found, "load"))],
    ]
    return [
        "### Share of the environment",
        "",
        f"`grpo-demo --steps {settings.steps}` with the tiny model and sums: 16 groups of 8 "
        "completions of about 3 tokens per step. Goal for the environment: at most "
        f"{MOST_SHARE} %: {_met(share, MOST_SHARE)}.",
        "",
        *table(rows),
    ]


def recording(settings: EnvironmentBenchSettings) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.environment_bench.recording"]
    found = in_turn(
        "recording",
        settings.rounds,
        {
            "off": lambda: _step_time(settings.steps, 0),
            "on": lambda: _step_time(settings.steps, KEPT),
            "writer": lambda: json_of(command),
        },
    )
    step_s, recorded_s = (values(found[side], "step_s") for side in ("off", "on"))
    writer_ms = values(found["writer"], "writer_ms")
    cost = 100 * (median(recorded_s) / median(step_s) - 1)
    share = median(writer_ms) / 10 / median(step_s)
    return [
        "### Recording rollouts",
        "",
        f"`grpo-demo --steps {settings.steps}` with and without `--trainer.keep-rollouts {KEPT}`, "
        "in turns: median of the step times of a run. The writer is a thread beside the steps.",
        "",
        *table(
            [
                ["", ""],
                ["step without recording, s", spread(step_s)],
                ["step with recording, s", spread(recorded_s)],
                ["difference of the medians, %", f"{cost:+.1f}"],
                ["CPU time of the writer per step, ms", spread(writer_ms)],
                ["the same over the time of a step, %", f"{share:.1f}"],
            ]
        ),
        "",
        f"Goal: a step takes at most {MOST_RECORDING} % longer: {_met(cost, MOST_RECORDING)}.",
    ]


def _step_time(steps: int, kept: int) -> Reading:
    flags = ["--steps", str(steps), "--eval-every", "0", "--trainer.keep-rollouts", str(kept)]
    records = demo_records(flags)[WARM_UP_STEPS:]
    return {"step_s": median(record["train/step_time"] for record in records)}


def _met(value: float, most: float) -> str:
    return "met" if value <= most else "**missed**"


if __name__ == "__main__":
    main()
