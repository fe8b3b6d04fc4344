"""The task `arithmetic` with its rewards in worker processes, as rewards of users run."""

from __future__ import annotations

from grpo_env.tasks.arithmetic import Arithmetic


class Sums(Arithmetic):
    blocks = True
