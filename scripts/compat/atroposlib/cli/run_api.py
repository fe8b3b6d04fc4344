"""Runs `run-api`."""

from __future__ import annotations

from grpo_api.__main__ import main

if __name__ == "__main__":
    main()
