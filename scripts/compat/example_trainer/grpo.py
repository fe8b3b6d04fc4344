"""Runs `grpo`."""

from __future__ import annotations

from grpo_trainer.__main__ import main

if __name__ == "__main__":
    main()
