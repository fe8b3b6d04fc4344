"""Runs `grpo-run`."""

from __future__ import annotations

from grpo_runs.__main__ import run

if __name__ == "__main__":
    run()
