"""The `run-api` command. Options are parsed before the web framework is imported."""

from __future__ import annotations

import sys

from grpo_core.errors import GrpoError
from grpo_core.logs import ending_on
from grpo_core.settings import load_settings
from grpo_core.tree.run_api import RunApiSettings


def main() -> None:
    settings = load_settings(RunApiSettings, sys.argv[1:], at_start=True)

    from grpo_api.app import serve

    with ending_on(GrpoError, OSError):
        serve(settings)


if __name__ == "__main__":
    main()
