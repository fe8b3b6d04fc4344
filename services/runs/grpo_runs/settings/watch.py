"""Options of `grpo-watch`."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field, SecretStr

from grpo_core.security import is_loopback, usable_token
from grpo_core.settings import Command, CommandSettings, Mistake, Shown
from grpo_runs.run_directory import LATEST, RUNS


class WatchSettings(CommandSettings):
    """Shows runs while they train, on a page in a browser or in the terminal: their services, the
    time of a step, curves, rollouts, evaluations and alerts. Several runs are compared."""

    command: ClassVar[Command] = Command(
        prog="grpo-watch",
        env_prefix="GRPO_WATCH_",
        positional=("runs",),
        examples=(
            "grpo-watch",
            "grpo-watch runs/a runs/b",
            "grpo-watch runs/latest --terminal",
        ),
    )

    runs: Annotated[list[Path], Shown(default="runs/latest", metavar="RUN")] = Field(
        [RUNS / LATEST],
        min_length=1,
        description="Directories of runs. They may train, or have ended",
    )
    terminal: bool = Field(False, description="Show the first run in this terminal, without a page")
    open: bool = Field(False, description="Open the page in a browser")
    host: str = Field("127.0.0.1", min_length=1, description="Address on which the page is served")
    port: Annotated[int, Shown(default="any free port")] = Field(
        0, ge=0, le=65535, description="Port on which the page is served"
    )
    token: Annotated[
        SecretStr | None,
        Shown(default="none; a random one if --host is no loopback address"),
        AfterValidator(usable_token),
    ] = Field(None, description="Token that a browser must know; it is part of the printed address")
    allowed_hosts: Annotated[str, Shown(default="none")] = Field(
        "", description="Public DNS names of the page, separated by commas"
    )
    run_api_token: Annotated[SecretStr | None, AfterValidator(usable_token)] = Field(
        None, description="Access token of the runs' run-api"
    )

    def mistakes(self) -> Iterator[Mistake]:
        if self.open and self.needed_token is not None:
            yield Mistake(
                "open",
                "other users of this machine could read the token on the browser's command line; "
                "omit --open, and open the address that is printed",
            )

    def start_mistakes(self) -> Iterator[Mistake]:
        for run in self.runs:
            if not run.is_dir():
                yield Mistake(
                    "runs",
                    f"no such directory: {run}; name that of a run, or start one with grpo-run",
                )

    @property
    def needed_token(self) -> SecretStr | None:
        """The token, drawn at random where the page can be reached from elsewhere."""
        if self.token is None and not is_loopback(self.host):
            return SecretStr(secrets.token_urlsafe(24))
        return self.token
