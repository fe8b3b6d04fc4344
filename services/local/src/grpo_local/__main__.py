"""`grpo-demo`: the whole system on one machine. `python -m grpo_local` is the same."""

from __future__ import annotations

import sys

from grpo_core.settings import load_settings
from grpo_local.settings import DemoSettings


def main() -> None:
    settings = load_settings(DemoSettings, sys.argv[1:])

    from grpo_local.commands.demo import run_demo
    from grpo_local.screen import Screen

    raise SystemExit(run_demo(settings, Screen()))


if __name__ == "__main__":
    main()
