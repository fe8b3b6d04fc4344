"""Prints losses and checksums of the weights of fixed runs, to compare two versions of the code:

    python -m benchmarks.same_run --save before.json
    python -m benchmarks.same_run --compare before.json   # exits with 1 if a run differs

Each run trains the tiny model for 20 steps on the same groups: in the four modes, with restarts, a
KL penalty, a teacher, float16 or dropout, on two ranks with and without FSDP2, and with the offline
trainer. Two ranks are also compared with one process. Every process is started by its command line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_core.clients.run_api import TrainerClient
from grpo_core.process import ManagedProcess
from grpo_core.redis.server import answers_ping, bundled_redis, redis_command
from grpo_core.wire.fields import MASKED, PROMPT_LOGPROB
from grpo_core.wire.run_api import Registration
from grpo_runs.process.ports import free_port
from grpo_tiny_model.model import ensure_tiny_model

STEPS = 20
GROUP_SIZE, BATCH_SIZE, COMPLETION_TOKENS = 4, 16, 8
DEADLINE_S = 600.0
TRAINER = ("-m", "grpo_trainer")
TORCHRUN = (*("-m", "torch.distributed.run", "--nproc-per-node", "2"), *TRAINER)
SERVER = (
    *("--max-model-len", "128", "--max-num-seqs", "16", "--dtype", "float32", "--enforce-eager"),
    *("--kv-cache-memory-bytes", str(64 * 1024 * 1024)),
)
KL = ("--kl-coef", "0.1", "--kl-control", "adaptive", "--kl-target", "0.01")
ADAPTER = ("--enable-lora",)
FSDP = ("--fsdp", "--gradient-checkpointing")
ADAFACTOR = ("--optimizer", "adafactor", "--train-layer-indices", "1")
EIGHT_BIT = ("--optimizer", "adamw_8bit")
ROUNDING = 1e-3
"""Largest difference of a loss, and relative one of a gradient norm, of two ranks and one process.
Sums in another order differ in the last bits of float32, and 20 steps of Adam enlarge that: its
update of a weight with a tiny gradient is as large as any."""


@dataclass(frozen=True)
class Case:
    """Args:
    options: of the trainer
    server: other options of the server
    command: starts the trainer
    like: name of the run of one process with the same results up to rounding
    """

    mode: str
    options: tuple[str, ...] = ()
    server: tuple[str, ...] = ()
    command: tuple[str, ...] = TRAINER
    like: str = ""


CASES = {
    "shared_vllm": Case("shared_vllm", server=("--share-weights",)),
    "lora_restart": Case("lora_restart", server=ADAPTER),
    "lora_only": Case("lora_only", server=ADAPTER),
    "none": Case("none"),
    "none, KL penalty": Case("none", KL),
    "none, MaxEnt": Case("none", ("--objective", "maxent", "--maxent-tau", "1")),
    "none, teacher": Case("none", ("--distill-coef", "0.5")),
    "none, float16": Case("none", server=("--dtype", "float16")),
    "none, restarts": Case("none", ("--publish", "restart")),
    "lora_only, dropout": Case("lora_only", ("--lora-dropout", "0.1"), ADAPTER),
    "none, two ranks": Case("none", KL, command=TORCHRUN, like="none, KL penalty"),
    "none, two ranks, FSDP2": Case("none", (*KL, *FSDP), (), TORCHRUN, "none, KL penalty"),
    "none, adafactor": Case("none", ADAFACTOR),
    "none, adafactor, FSDP2": Case("none", (*ADAFACTOR, *FSDP), (), TORCHRUN, "none, adafactor"),
    "none, 8-bit": Case("none", EIGHT_BIT),
    "none, 8-bit, FSDP2": Case("none", (*EIGHT_BIT, *FSDP), (), TORCHRUN, "none, 8-bit"),
    "lora_only, two ranks": Case("lora_only", (), ADAPTER, TORCHRUN, "lora_only"),
    "lora_only, FSDP2": Case("lora_only", FSDP, ADAPTER, TORCHRUN, "lora_only"),
    "lora_restart, FSDP2": Case("lora_restart", FSDP, ADAPTER, TORCHRUN, "lora_restart"),
}
OFFLINE = "offline"
OFFLINE_KEYS = (
    *("model.device=cpu", "generation.backend=local", "generation.max_new_tokens=8"),
    *("eval.backend=local", "eval.max_new_tokens=8", "eval.num_ids=3", "eval.replicates=2"),
    *("data.task=arithmetic", "train.iterations=6", "train.lr=1e-3", "grpo.seq_len=64"),
)


def sampled_groups(model_path: Path) -> list[dict[str, Any]]:
    """Groups for all steps, sampled from the initial weights; their scores are random. The teacher
    gives each token a logprob of -1."""
    torch.manual_seed(0)
    numbers = random.Random(0)
    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
    groups = []
    for _ in range(STEPS * BATCH_SIZE // GROUP_SIZE):
        prompt = tokenizer.encode(f"{numbers.randrange(100)}+{numbers.randrange(100)}=")
        sampled = model.generate(
            torch.tensor([prompt] * GROUP_SIZE),
            do_sample=True,
            top_k=0,
            min_new_tokens=COMPLETION_TOKENS,
            max_new_tokens=COMPLETION_TOKENS,
        )
        with torch.no_grad():
            logits = model(sampled).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, sampled[:, 1:, None])[..., 0]
        first = len(prompt)
        groups.append(
            {
                "tokens": sampled.tolist(),
                "masks": [[MASKED] * first + row for row in sampled[:, first:].tolist()],
                "scores": [float(numbers.randrange(4)) for _ in range(GROUP_SIZE)],
                "inference_logprobs": [
                    [PROMPT_LOGPROB] * first + row for row in logprobs[:, first - 1 :].tolist()
                ],
                "distill_token_ids": sampled[..., None].tolist(),
                "distill_logprobs": torch.full((*sampled.shape, 1), -1.0).tolist(),
            }
        )
    return groups


@contextmanager
def running(
    name: str, words: list[str], directory: Path, is_ready: Callable[[], bool]
) -> Iterator[ManagedProcess]:
    threads = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    process = ManagedProcess(name, words, directory / f"{name}.log", threads)
    try:
        process.wait_until(is_ready, DEADLINE_S)
        yield process
    finally:
        process.kill()


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def services(case: Case, model: Path, directory: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Redis, run-api with a registered run, and a server. Gives run-api's URL, that of the server's
    state, and the options of a trainer that takes part."""
    redis, api, server, health = (free_port() for _ in range(4))
    redis_url, saved = f"redis://127.0.0.1:{redis}/0", directory / "saved"
    (saved / "served_weights").mkdir(parents=True)
    (directory / "redis").mkdir()
    api_url, health_url = f"http://127.0.0.1:{api}", f"http://127.0.0.1:{health}"
    python = sys.executable
    of_run = ("--redis-url", redis_url, "--run-id", "same")
    files = case.mode != "shared_vllm"
    place = ("--weights-dir", str(saved / "served_weights"), *of_run) if files else ()
    ports = ("--port", str(server), "--health-port", str(health))
    socket = ("--redis-url", "none", "--weights-socket", str(directory / "s.sock"))
    bridge = ("--bridge-config-path", str(directory / "bridge.json"))
    words = [*SERVER, *case.server, *ports, *(place or (*socket, *bridge)), "--model", str(model)]
    with ExitStack() as stack:
        for name, command, is_ready in (
            (
                "redis",
                redis_command(redis, directory / "redis", bundled_redis()),
                lambda: answers_ping(redis),
            ),
            (
                "run-api",
                [python, "-m", "grpo_api", "--port", str(api), *of_run],
                lambda: answers(f"{api_url}/health"),
            ),
            (
                "vllm-server",
                [python, "-m", "grpo_vllm", *words],
                lambda: answers(f"{health_url}/healthz"),
            ),
        ):
            stack.enter_context(running(name, command, directory, is_ready))
        registration = Registration(
            wandb_group="g",
            wandb_project="p",
            batch_size=BATCH_SIZE,
            max_token_len=128,
            checkpoint_dir=str(saved),
            save_checkpoint_interval=0,
            starting_step=0,
            num_steps=-1,
        )
        with TrainerClient(api_url) as client:
            client.register(registration)
        yield (
            api_url,
            f"{health_url}/status",
            [
                *("--model", str(model), "--mode", case.mode, "--run-api-url", api_url),
                *("--inference-url", f"http://127.0.0.1:{server}", "--steps", str(STEPS)),
                *("--batch-size", str(BATCH_SIZE), "--gradient-accumulation-steps", "1"),
                *("--metrics-file", str(directory / "metrics.jsonl"), "--save-path", str(saved)),
                *("--checkpoint-interval", "0"),
                *(of_run if files else ()),
                *case.options,
            ],
        )


def run(case: Case, model: Path, groups: list[dict[str, Any]], directory: Path) -> dict[str, Any]:
    """What a run of `grpo` computed."""
    with services(case, model, directory) as (api_url, status_url, options):
        for group in groups:
            httpx.post(f"{api_url}/scored_data", json=group).raise_for_status()
        options += ["--lr", "1e-3", "--seq-len", "64", "--tokens-per-micro-batch", "40"]
        options += ["--state-interval", "7"]
        if case.mode in ("none", "lora_restart"):
            options += ["--vllm-restart-interval", "10"]
        command = [sys.executable, *case.command, *options]
        with running("trainer", command, directory, lambda: True) as trainer:
            if trainer.wait(DEADLINE_S):
                raise SystemExit(f"the trainer failed:\n{trainer.log_tail(40)}")
        restarts = httpx.get(status_url).json()["restarts"]
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    values = [(line["train/loss"], line["train/grad_norm"]) for line in lines]
    exported = "adapter_model" if "lora" in case.mode else "model"
    return {
        "losses": [loss for loss, _ in values],
        "norms": [norm for _, norm in values],
        "weights": _checksum((directory / "saved").glob(f"final_*/{exported}.safetensors")),
        "restarts": restarts,
    }


def run_offline(model: Path, directory: Path) -> dict[str, Any]:
    """What a run of `grpo-offline` computed."""
    ids = (f"model.train_id={model}", f"model.ref_id={model}", f"hydra.run.dir={directory}/run")
    words = [sys.executable, "-m", "grpo_runs.offline", *ids, *OFFLINE_KEYS]
    with running("offline", words, directory, lambda: True) as process:
        if process.wait(DEADLINE_S):
            raise SystemExit(f"grpo-offline failed:\n{process.log_tail(40)}")
    records = [
        json.loads(p.read_text()) for p in sorted(directory.glob("run/**/train_iter_*.json"))
    ]
    return {
        "losses": [record["loss_total"] for record in records],
        "norms": [record["grad_norm"] for record in records],
        "weights": _checksum(directory.glob("run/**/final_model/model.safetensors")),
    }


def _distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    losses = zip(one["losses"], other["losses"], strict=True)
    norms = zip(one["norms"], other["norms"], strict=True)
    pairs = [abs(a - b) for a, b in losses] + [abs(a - b) / b for a, b in norms]
    return float(max(pairs))


def _checksum(paths: Iterator[Path]) -> str:
    (path,) = paths
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", type=Path, help="file that the results are written to")
    parser.add_argument("--compare", type=Path, help="file with the results to compare with")
    parser.add_argument("--only", nargs="*", default=[*CASES, OFFLINE], help="names of runs")
    args = parser.parse_args()
    model = ensure_tiny_model()
    groups, found = sampled_groups(model), {}
    expected = json.loads(args.compare.read_text()) if args.compare else {}
    differ = []
    for name in args.only:
        with tempfile.TemporaryDirectory(prefix="same-") as directory:
            place = Path(directory)
            found[name] = (
                run_offline(model, place)
                if name == OFFLINE
                else run(CASES[name], model, groups, place)
            )
        one = found[name]
        verdict = ""
        if name in expected:
            others = [fact for fact, value in expected[name].items() if one.get(fact) != value]
            verdict = f"DIFFERS in {', '.join(others)}" if others else "same"
            differ += [name] if others else []
        like = CASES[name].like if name in CASES else ""
        if like in found:
            off = _distance(one, found[like])
            verdict += f" within {off:.1g} of {like}"
            differ += [name] if not off <= ROUNDING else []
        last = one["losses"][-1] if one["losses"] else math.nan
        sys.stdout.write(
            f"{name:24} last loss {last:+.9f}, grad norm {one['norms'][-1]:.9f}, "
            f"weights {one['weights'][:16]} {verdict}\n"
        )
        sys.stdout.flush()
    if args.save:
        args.save.write_text(json.dumps(found, indent=1))
    raise SystemExit(1 if differ else 0)


if __name__ == "__main__":
    main()
