"""What atroposlib makes of command lines: the servers and the number of steps it would run with.

Called as `python command_lines.py <request.json> <answer.json>`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import openai
from atroposlib.envs.base import APIServerConfig, BaseEnvConfig
from sums_environment import SumsEnvironment


class ReportingEnvironment(SumsEnvironment):
    """Says what it was given instead of running."""

    given: dict[str, Any]

    async def env_manager(self) -> None:
        type(self).given = {
            "urls": [server.config.base_url for server in self.server.servers],
            "total_steps": self.config.total_steps,
            "group_size": self.config.group_size,
        }


class BareEnvironment(ReportingEnvironment):
    """Its `config_init` gives the server's configuration without a list around it."""

    @classmethod
    def config_init(cls) -> tuple[Any, Any]:
        return BaseEnvConfig(wandb_name="sums"), APIServerConfig(server_type="vllm")


def outcome(bare: bool, flags: list[str]) -> dict[str, Any]:
    environment = BareEnvironment if bare else ReportingEnvironment
    sys.argv = ["environment", "serve", *flags]
    try:
        environment.cli()
    except SystemExit as end:
        return environment.given if end.code == 0 else {"exit": end.code}
    except openai.OpenAIError as error:
        return {"error": str(error)}
    return environment.given


if __name__ == "__main__":
    request_path, answer_path = map(Path, sys.argv[1:])
    cases = json.loads(request_path.read_text())
    answer_path.write_text(json.dumps({name: outcome(**case) for name, case in cases.items()}))
