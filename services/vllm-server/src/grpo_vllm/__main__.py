"""`vllm-api-server`: parse first, import vLLM afterwards."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import structlog

from grpo_core.errors import GrpoError
from grpo_core.logs import configure_logging
from grpo_core.settings import load_settings
from grpo_vllm.plugin_names import SHARE_WEIGHTS_VARIABLE
from grpo_vllm.settings import ServerSettings

EXIT_FAILED = 1


def main(argv: Sequence[str] | None = None) -> None:
    settings = load_settings(
        ServerSettings,
        sys.argv[1:] if argv is None else argv,
        variables={
            "share_weights": SHARE_WEIGHTS_VARIABLE,
            "bridge_config_path": "VLLM_BRIDGE_CONFIG_PATH",
            "logdir": "LOGDIR",
        },
    )
    configure_logging("vllm-server", settings.log_level)
    # Inherited by the engine's processes: our plugin registers there only where it is wanted.
    os.environ[SHARE_WEIGHTS_VARIABLE] = "1" if settings.share_weights else "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # vLLM's development routes pause, resume and call workers for anyone, without a token.
    os.environ["VLLM_SERVER_DEV_MODE"] = "0"

    from grpo_vllm import server

    try:
        server.run(settings)
    except GrpoError as error:
        structlog.get_logger().error(type(error).__name__, reason=str(error))
        raise SystemExit(EXIT_FAILED) from None


if __name__ == "__main__":
    main()
