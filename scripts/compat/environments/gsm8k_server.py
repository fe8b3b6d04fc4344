"""Runs `env-server gsm8k`."""

from __future__ import annotations

import sys

from grpo_env.__main__ import main

if __name__ == "__main__":
    main(["gsm8k", *sys.argv[1:]])
