"""`vllm-api-server`: the supervisor, which starts the engine process and never imports vLLM."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import structlog

from grpo_core.errors import GrpoError
from grpo_core.logs import configure_logging
from grpo_core.settings import load_settings
from grpo_core.tree.server import ServerSettings

EXIT_FAILED = 1


def main(argv: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else list(argv)
    settings = load_settings(ServerSettings, arguments, at_start=True)
    configure_logging("vllm-server", settings.log_level)

    from grpo_vllm.supervisor.main import supervise

    try:
        status = supervise(settings, arguments)
    except (GrpoError, OSError) as error:
        structlog.get_logger().error(type(error).__name__, reason=str(error))
        raise SystemExit(EXIT_FAILED) from None
    raise SystemExit(status)


if __name__ == "__main__":
    main()
