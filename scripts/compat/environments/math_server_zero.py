"""Runs `env-server math`."""

from __future__ import annotations

import sys

from grpo_env.__main__ import main

if __name__ == "__main__":
    main(["math", *sys.argv[1:]])
