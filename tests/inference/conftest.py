"""One thread for torch in the process of the tests. A second one spins while it waits for a core
that a server uses: a step of the tiny model then takes 20 times the CPU time."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
