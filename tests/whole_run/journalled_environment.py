"""Runs `env-server`, with a journal of the groups that it sends.

Each line of the journal is a word and a digest: `sent` before a submission, `acknowledged` after
run-api's answer. Nothing else differs from `env-server`.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from grpo_core.clients.run_api import EnvironmentClient
from grpo_env.__main__ import main
from grpo_trainer.data.filter import digest
from tests.whole_run.stages import SUBMISSIONS

SENT, ACKNOWLEDGED = "sent", "acknowledged"


def _noting(submit: Callable[..., Awaitable[Any]], path: Path) -> Callable[..., Awaitable[Any]]:
    def note(word: str, name: str) -> None:
        with path.open("a") as journal:
            journal.write(f"{word} {name}\n")

    async def submitting(client: Any, group: Any, *given: Any) -> Any:
        name = digest(group).hex()
        note(SENT, name)
        answer = await submit(client, group, *given)
        note(ACKNOWLEDGED, name)
        return answer

    return submitting


if __name__ == "__main__":
    EnvironmentClient.submit = _noting(  # type: ignore[assignment,method-assign]
        EnvironmentClient.submit, Path(os.environ[SUBMISSIONS])
    )
    main()
