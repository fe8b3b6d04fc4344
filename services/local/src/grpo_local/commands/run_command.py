"""`grpo-run`: server and trainer together. `python -m grpo_local.commands.run_command`."""

from __future__ import annotations

import sys

from grpo_core.settings import EXIT_USAGE, load_settings
from grpo_local.commands.argument_split import split_arguments, taken_flags
from grpo_local.commands.run_settings import RunSettings

OURS = (
    *("--model", "--model-name", "--weight-bridge-mode", "--redis-url", "--run-id"),
    *("--atropos-url", "--vllm-port", "--vllm-url", "--save-path", "--weights-socket"),
    *("--lora-r", "--lora-alpha", "--lora-dropout", "--lora-target-modules"),
    *("--vllm-restart-interval", "--adapter-sync-interval"),
)
"""The server, or both, hang on these."""


def main() -> None:
    arguments = split_arguments(sys.argv[1:])
    settings = load_settings(RunSettings, arguments.own)
    if taken := taken_flags(arguments.passed_on, OURS):
        sys.stderr.write(f"grpo-run: {', '.join(taken)}: grpo-run's own; say it before the --\n")
        raise SystemExit(EXIT_USAGE)

    from grpo_local.commands.run import run_together
    from grpo_local.screen import Screen

    raise SystemExit(run_together(settings, arguments.passed_on, Screen()))


if __name__ == "__main__":
    main()
