"""`vllm-api-server`: the supervisor, which starts the engine process and never imports vLLM."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from grpo_core.errors import GrpoError
from grpo_core.logs import configure_logging, ending_on
from grpo_core.settings import load_settings
from grpo_core.tree.server import ServerSettings


def main(argv: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else list(argv)
    settings = load_settings(ServerSettings, arguments, at_start=True)
    configure_logging("vllm-server", settings.log_level)

    from grpo_vllm.supervisor.main import supervise

    with ending_on(GrpoError, OSError):
        raise SystemExit(supervise(settings, arguments))


if __name__ == "__main__":
    main()
