"""Injects every fault into a real run, and writes the table."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from grpo_core.redis.server import bundled_redis
from grpo_local.process.ports import free_port
from grpo_tiny_model.model import ensure_tiny_model
from tests.fixtures.inference import start_inference, stop_inference
from tests.fixtures.run_api import start_run_api
from tests.silent_faults.faults import ALSO, FAULTS, LORA, SHARED, Fault
from tests.silent_faults.producer import FAULT_FROM
from tests.silent_faults.runs import Outcome, Site, lora_site, run_with, shared_site
from tests.support.redis_server import start_redis

STALE = 2
"""Steps between sampling and training in the runs on old data."""


@dataclass(frozen=True)
class Row:
    name: str
    fault: Fault
    outcome: Outcome
    is_stale: bool

    def caught(self) -> str:
        report = self.outcome.first(self.fault.named)
        if report is None:
            return "no"
        if not self.fault.is_of_environment:
            return (
                "before the first step"
                if not report.step and "SelfTest" in report.text
                else (f"step {report.step + 1}")
            )
        return f"step {report.step - FAULT_FROM + 1}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="make silent-faults", description=__doc__)
    parser.add_argument("--only", help="faults whose name contains this text")
    options = parser.parse_args()
    faults = {
        name: fault
        for name, fault in (FAULTS | ALSO).items()
        if options.only is None or options.only in name
    }
    with tempfile.TemporaryDirectory() as directory, sites(Path(directory), faults) as by_mode:
        for name, fault in faults.items():
            for late in (0, STALE) if fault.is_of_environment else (0,):
                target = Path(directory) / f"{name}-{late}"
                target.mkdir()
                outcome = run_with(fault, by_mode[fault.mode], target, batches_late=late)
                row = Row(name, fault, outcome, bool(late))
                told = "\n".join(f"    {r.step}: {r.text[:300]}" for r in outcome.reports[:6])
                sys.stdout.write(f"{name} (late {late}): {row.caught()}\n{told}\n")
                sys.stdout.flush()


@contextmanager
def sites(directory: Path, faults: dict[str, Fault]) -> Iterator[dict[str, Site]]:
    modes = {fault.mode for fault in faults.values()}
    model = ensure_tiny_model()
    with ExitStack() as stack:
        port = free_port()
        redis = start_redis(port, directory, bundled_redis())
        stack.callback(redis.stop)
        redis_url = f"redis://127.0.0.1:{port}/0"
        api = start_run_api(redis_url, directory)
        stack.callback(api.process.stop)
        found = {}
        if SHARED in modes:
            shared = start_inference(
                model,
                directory,
                *("--dtype", "float32", "--redis-url", redis_url, "--run-id", "shared"),
            )
            stack.callback(stop_inference, shared)
            found[SHARED] = stack.enter_context(shared_site(shared, api.url))
        if LORA in modes:
            lora = directory / "lora"
            lora.mkdir()
            found[LORA] = stack.enter_context(lora_site(model, redis_url, api.url, lora))
        yield found


main()
