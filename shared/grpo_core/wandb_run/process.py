"""The child process that sends records to Weights & Biases.

`sink` starts it as `python -m grpo_core.wandb_run.process`. It reads one JSON object per line:
first {"start": ...}, then {"record": ...} for each record and {"table": ...} for each table, then
{"finish": exit status}. It answers the first with {"run": URL or directory} or {"error": reason}.
If the input ends without "finish", the parent died, and the run is marked as failed.
"""

from __future__ import annotations

import json
import sys
from typing import IO, Any


def main(source: IO[str] = sys.stdin, answers: IO[str] = sys.stdout) -> None:
    start = json.loads(source.readline())["start"]
    run = _start(start, answers)
    exit_code = 1
    for line in source:
        message = json.loads(line)
        if "finish" in message:
            exit_code = message["finish"]
            break
        record = _table_of(message["table"]) if "table" in message else message["record"]
        run.log(record, step=record["step"] if start["one_record_per_step"] else None)
    run.finish(exit_code=exit_code)


def _start(start: dict[str, Any], answers: IO[str]) -> Any:
    import wandb

    try:
        run = wandb.init(
            project=start["project"],
            group=start["group"],
            name=start["name"],
            config=start["config"],
            settings=wandb.Settings(
                console="off",
                init_timeout=start["init_timeout_s"],
                finish_timeout=start["finish_timeout_s"],
                x_stats_pid=start["pid"],
            ),
        )
    except wandb.Error as error:
        _answer(answers, {"error": f"{type(error).__name__}: {error}"})
        raise SystemExit(1) from None
    if not start["one_record_per_step"]:
        run.define_metric("*", step_metric="step")
    _answer(answers, {"run": run.url or run.dir})
    return run


def _table_of(table: dict[str, Any]) -> dict[str, Any]:
    import wandb

    value = wandb.Table(columns=table["columns"], data=table["rows"])
    return {"step": table["step"], table["name"]: value}


def _answer(answers: IO[str], message: dict[str, str]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
