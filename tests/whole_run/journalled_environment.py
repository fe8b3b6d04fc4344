"""Runs `env-server`, which notes the groups that it sends. Nothing else differs."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from grpo_core.clients.run_api import EnvironmentClient
from grpo_env.__main__ import main
from grpo_trainer.data.filter import digest
from tests.whole_run.journal import VARIABLE, Journal, Outcome


def _noting(
    submit: Callable[..., Awaitable[Any]], journal: Journal
) -> Callable[..., Awaitable[Any]]:
    async def submitting(client: Any, group: Any, *given: Any) -> Any:
        call = journal.sent({digest(group).hex(): group.size})
        answer = await submit(client, group, *given)
        journal.settled(call, Outcome.ACKNOWLEDGED)
        return answer

    return submitting


if __name__ == "__main__":
    EnvironmentClient.submit = _noting(  # type: ignore[assignment,method-assign]
        EnvironmentClient.submit, Journal(Path(os.environ[VARIABLE]), "environment")
    )
    main()
