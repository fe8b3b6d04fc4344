"""Runs of Weights & Biases. As a program, this module is the child process of `TrackerSink`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from grpo_core.errors import WandbUnavailable
from grpo_core.tracker import CannotOpen, Tool, TrackerSink, serve

_INIT_TIMEOUT_S = 90.0
_UPLOAD_TIMEOUT_S = 25.0
WANDB = Tool(
    name="W&B",
    event="wandb",
    module="grpo_core.wandb_run",
    start_advice="see the messages of W&B above. Log in with `wandb login`, or set "
    "WANDB_MODE=offline and upload later with `wandb sync`, or omit --use-wandb",
    failure_hint="see the messages of W&B above; `wandb sync` uploads the records in ./wandb",
    unavailable=WandbUnavailable,
)


def start_wandb(
    project: str | None,
    group: str | None,
    config: Mapping[str, Any],
    *,
    name: str | None = None,
    one_record_per_step: bool = True,
    api_key: str | None = None,
) -> TrackerSink:
    """Start the child process and wait until W&B has opened a run.

    Args:
        project, group, name: None or "": W&B chooses
        config: the options to show
        one_record_per_step: False if a record's step may repeat an earlier one
        api_key: None if W&B finds a key itself

    Raises:
        WandbUnavailable: W&B did not open a run, for example because no user is logged in.
    """
    start = {
        "project": project or None,
        "group": group or None,
        "name": name,
        "config": config,
        "one_record_per_step": one_record_per_step,
    }
    return TrackerSink.started(WANDB, start, {"WANDB_API_KEY": api_key} if api_key else {})


class _OpenWandb:
    def __init__(self, start: dict[str, Any]) -> None:
        import wandb

        self._has_steps = start["one_record_per_step"]
        try:
            self._run = wandb.init(
                project=start["project"],
                group=start["group"],
                name=start["name"],
                config=start["config"],
                settings=wandb.Settings(
                    console="off",
                    init_timeout=_INIT_TIMEOUT_S,
                    finish_timeout=_UPLOAD_TIMEOUT_S,
                    x_stats_pid=os.getppid(),
                ),
            )
        except wandb.Error as error:
            raise CannotOpen(f"{type(error).__name__}: {error}") from None
        if not self._has_steps:
            self._run.define_metric("*", step_metric="step")
        self.where = self._run.url or self._run.dir

    def log(self, record: dict[str, Any]) -> None:
        self._run.log(record, step=record["step"] if self._has_steps else None)

    def log_table(self, table: dict[str, Any]) -> None:
        import wandb

        value = wandb.Table(columns=table["columns"], data=table["rows"])
        self.log({"step": table["step"], table["name"]: value})

    def finish(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


if __name__ == "__main__":
    serve(_OpenWandb)
