"""`grpo-compare`: every mode, measured. `python -m grpo_local.commands.compare_command`."""

from __future__ import annotations

import sys

from grpo_core.settings import EXIT_USAGE, load_settings
from grpo_local.commands.argument_split import split_arguments, taken_flags
from grpo_local.commands.compare_settings import CompareSettings

OURS = ("--mode", "--steps", "--seed", "--run-dir")


def main() -> None:
    arguments = split_arguments(sys.argv[1:])
    settings = load_settings(CompareSettings, arguments.own)
    if taken := taken_flags(arguments.passed_on, OURS):
        sys.stderr.write(f"grpo-compare: {', '.join(taken)}: the same for all, or set here\n")
        raise SystemExit(EXIT_USAGE)

    from grpo_local.commands.compare import compare
    from grpo_local.screen import Screen

    raise SystemExit(compare(settings, arguments.passed_on, Screen()))


if __name__ == "__main__":
    main()
