"""The commands: each parses its options first, and imports what it needs afterwards.

`python -m grpo_local` is `grpo-demo`; `python -m grpo_local run` and `python -m grpo_local compare`
are `grpo-run` and `grpo-compare`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from grpo_core.settings import EXIT_USAGE, load_settings
from grpo_local.settings import CompareSettings, DemoSettings, RunSettings

PASS_ON = "--"
"""What stands behind it is passed on."""
SET_BY_COMPARE = ("--mode", "--steps", "--seed", "--run-dir")
SET_BY_RUN = (
    *("--model", "--model-name", "--weight-bridge-mode", "--redis-url", "--run-id"),
    *("--atropos-url", "--vllm-port", "--vllm-url", "--save-path", "--weights-socket"),
    *("--lora-r", "--lora-alpha", "--lora-dropout", "--lora-target-modules"),
    *("--vllm-restart-interval", "--adapter-sync-interval"),
)
"""The server, or both, hang on these."""


def main() -> None:
    """`grpo-demo`: the whole system on one machine."""
    settings = load_settings(DemoSettings, sys.argv[1:])

    from grpo_local.commands.demo import run_demo
    from grpo_local.screen import Screen

    raise SystemExit(run_demo(settings, Screen()))


def run() -> None:
    """`grpo-run`: inference server and trainer; what stands behind `--` goes to the trainer."""
    own, passed_on = _split(sys.argv[1:])
    settings = load_settings(RunSettings, own)
    _refuse("grpo-run", passed_on, SET_BY_RUN, "grpo-run's own; say it before the --")

    from grpo_local.commands.run import run_together
    from grpo_local.screen import Screen

    raise SystemExit(run_together(settings, passed_on, Screen()))


def compare() -> None:
    """`grpo-compare`: a demo in every mode, which gets what stands behind `--`."""
    own, passed_on = _split(sys.argv[1:])
    settings = load_settings(CompareSettings, own)
    _refuse("grpo-compare", passed_on, SET_BY_COMPARE, "the same for all, or set here")

    from grpo_local.commands.compare_modes import compare_modes
    from grpo_local.screen import Screen

    raise SystemExit(compare_modes(settings, passed_on, Screen()))


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before the first `--`, and what stands behind it."""
    end = words.index(PASS_ON) if PASS_ON in words else len(words)
    return list(words[:end]), list(words[end + 1 :])


def _refuse(prog: str, passed_on: Sequence[str], ours: Sequence[str], reason: str) -> None:
    """End with status 2 if `passed_on` holds a flag that the command sets itself."""
    given = {word.partition("=")[0].replace("_", "-") for word in passed_on}
    if taken := sorted(given & set(ours)):
        sys.stderr.write(f"{prog}: {', '.join(taken)}: {reason}\n")
        raise SystemExit(EXIT_USAGE)


if __name__ == "__main__":
    if named := {"run": run, "compare": compare}.get("".join(sys.argv[1:2])):
        del sys.argv[1]
    (named or main)()
