"""A full disk ends no process that logs to it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import structlog
from grpo_core.logs import configure_logging

configure_logging("test")
for number in range(1000):
    structlog.get_logger().info("number.counted", number=number)
print("done")
"""


def test_a_process_whose_log_is_on_a_full_disk_goes_on() -> None:
    variables = {**os.environ, "PYTHONUNBUFFERED": "1"}  # as launcher and images start services
    command = [sys.executable, "-c", PROGRAM]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, env=variables)
    assert (done.returncode, done.stdout) == (0, b"done\n")
