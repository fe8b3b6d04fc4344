"""Settings of OpenMP for processes that compute on the same cores."""

from __future__ import annotations

import os

SPIN_COUNT = ("GOMP_SPINCOUNT", "2000")
"""Number of times that a thread without work looks for some, before it sleeps.

By default a thread spins for milliseconds, on a core that another process could use: a trainer and
a server with two threads each on two cores then take several times as long for a step. A thread
that sleeps at once (OMP_WAIT_POLICY=PASSIVE) must be woken for each operation.
"""

WAIT_POLICY = "OMP_WAIT_POLICY"
"""OpenMP's own variable for the same."""


def share_cores() -> None:
    """Call this before torch is imported, because OpenMP reads the environment once. What the user
    has set wins."""
    if WAIT_POLICY not in os.environ:
        os.environ.setdefault(*SPIN_COUNT)
