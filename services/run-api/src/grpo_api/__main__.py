"""The `run-api` command. Options are parsed before the web framework is imported."""

from __future__ import annotations

import sys

from grpo_api.settings import RunApiSettings
from grpo_core.settings import load_settings


def main() -> None:
    settings = load_settings(RunApiSettings, sys.argv[1:], at_start=True)

    from grpo_api.app import serve

    serve(settings)


if __name__ == "__main__":
    main()
