"""The `run-api` command. Options are parsed before the web framework is imported."""

from __future__ import annotations

import sys

import structlog

from grpo_core.errors import GrpoError
from grpo_core.settings import load_settings
from grpo_core.tree.run_api import RunApiSettings

EXIT_FAILED = 1


def main() -> None:
    settings = load_settings(RunApiSettings, sys.argv[1:], at_start=True)

    from grpo_api.app import serve

    try:
        serve(settings)
    except (GrpoError, OSError) as error:
        structlog.get_logger().error(type(error).__name__, reason=str(error))
        raise SystemExit(EXIT_FAILED) from None


if __name__ == "__main__":
    main()
