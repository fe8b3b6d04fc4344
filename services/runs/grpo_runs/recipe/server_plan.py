"""Prints for training.sh which server a recipe needs, as lines `NAME=VALUE`.

`python -m grpo_runs.recipe.server_plan SCRIPT FLAG...`: SCRIPT is the entry point, FLAG its
flags. GPUS names the GPUs of the job (`0,1,2`; empty: train on the CPU). A mistake in the recipe
ends the process with status 2, before a server starts.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from grpo_core.errors import GrpoError
from grpo_core.tree.weights import ModeName, served_weights_directory
from grpo_core.weights.directory_checks import LORA_RANKS
from grpo_runs.offline.command_line import EXIT_USAGE, end
from grpo_runs.offline.errors import RecipeInvalid
from grpo_runs.offline.keys import in_recipe
from grpo_runs.offline.servers import Sampling
from grpo_runs.offline.translate import option_mistakes
from grpo_runs.recipe.keys import Script, TrainingRecipe, read_recipe
from grpo_runs.recipe.translation import (
    LORA_MODES,
    names_of,
    rank_count,
    run_directory,
    sync_mode,
    translate,
)

_MAX_LEN, _MEMORY, _MEMORY_SHARED = 2048, 0.90, 0.45
_RESIDENT_ADAPTERS = 4


@dataclass(frozen=True)
class ServerPlan:
    """What training.sh starts. Args: server_gpus, train_gpus: CUDA_VISIBLE_DEVICES; "" on a CPU"""

    model: str
    mode: str
    redis: Literal["yes", "no"]
    server_gpus: str
    train_gpus: str
    ranks: int
    arguments: list[str]

    def lines(self) -> Iterator[str]:
        values = {**vars(self)}
        arguments = values.pop("arguments")
        yield from (f"{name}={value}" for name, value in values.items())
        yield from (f"argument={word}" for word in arguments)


def server_plan(recipe: TrainingRecipe, environment: Mapping[str, str]) -> ServerPlan:
    """Divide the GPUs. Raises `RecipeInvalid`: the recipe or a variable does not fit them."""
    gpus = [gpu for gpu in environment.get("GPUS", "").split(",") if gpu]
    own_width = str(recipe["vllm_tensor_parallel_size"])
    width = _number("VLLM_TP_SIZE", environment.get("VLLM_TP_SIZE") or own_width)
    spare = "1" if sync_mode(recipe) == "shared_vllm" else str(max(1, len(gpus) - width))
    ranks = _number("TRAIN_RANKS", environment.get("TRAIN_RANKS") or spare)
    rank_count(environment)
    keys = translate(recipe, lambda _: 1, ranks)
    mode = keys.sync.mode
    if mode == "auto":
        is_one = len(gpus) <= 1 and width == ranks == 1
        mode = "shared_vllm" if is_one else "none"
    # A mistake ends the process, as it would end the training once the server runs.
    sampling = Sampling("ours", cast(ModeName, mode))
    if mistakes := option_mistakes(keys, sampling, Path(), at_start=False):
        raise RecipeInvalid(in_recipe("\n".join(mistakes), names_of(recipe)))
    shares_gpu = mode == "shared_vllm" or len(gpus) == 1
    server, train = gpus[:width], gpus[:ranks] if shares_gpu else gpus[width : width + ranks]
    if gpus and (len(server) < width or len(train) < ranks):
        raise RecipeInvalid(
            f"{len(gpus)} GPUs ({','.join(gpus)}) do not suffice for a server on {width} "
            f"(VLLM_TP_SIZE) and {ranks} training ranks (TRAIN_RANKS)"
        )
    dtype = environment.get("VLLM_DTYPE") or keys.model.dtype
    arguments = [
        *("--model", keys.model.train_id),
        *("--tensor-parallel-size", str(width)),
        *(() if dtype == "auto" else ("--dtype", dtype)),
        *_weights(recipe, mode),
        *_sizes(recipe, environment, bool(gpus), shares_gpu),
        *shlex.split(environment.get("VLLM_FLAGS", "")),
    ]
    redis: Literal["yes", "no"] = "no" if mode in ("shared_vllm", "frozen") else "yes"
    gpus_of_both = ",".join(server), ",".join(train)
    return ServerPlan(keys.model.train_id, mode, redis, *gpus_of_both, ranks, arguments)


def _weights(recipe: TrainingRecipe, mode: str) -> list[str]:
    if mode == "shared_vllm":
        return ["--share-weights"]
    served = served_weights_directory(run_directory(recipe).absolute())
    words = ["--no-share-weights", "--weights-dir", str(served)]
    if mode not in LORA_MODES:
        return words
    rank = next((rank for rank in LORA_RANKS if rank >= recipe["lora_r"]), None)
    if rank is None:
        raise RecipeInvalid(f"lora_r: {recipe['lora_r']}; vLLM has at most {LORA_RANKS[-1]}")
    adapters = ("--max-lora-rank", str(rank), "--max-loras", str(_RESIDENT_ADAPTERS))
    return [*words, "--enable-lora", *adapters]


def _sizes(
    recipe: TrainingRecipe, environment: Mapping[str, str], on_gpu: bool, shares_gpu: bool
) -> list[str]:
    length = environment.get("VLLM_MAX_LEN") or recipe["vllm_max_model_length"] or _MAX_LEN
    words = ["--max-model-len", str(length)]
    if not on_gpu:
        return [*words, "--enforce-eager"]
    memory = environment.get("VLLM_MEM_UTIL") or recipe.given.get("vllm_gpu_memory_utilization")
    memory = memory or (_MEMORY_SHARED if shares_gpu else _MEMORY)
    return [*words, "--gpu-memory-utilization", str(memory)]


def _number(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise RecipeInvalid(f"{name}: expected a number above 0; got {text!r}")
    return int(text)


def main(argv: Sequence[str]) -> None:
    script: Script = "maxent" if "maxent" in Path(argv[0]).name else "grpo"
    try:
        for line in server_plan(read_recipe(argv[1:], script), os.environ).lines():
            sys.stdout.write(f"{line}\n")
    except GrpoError as error:
        end("training.sh", EXIT_USAGE, "\ntraining.sh: ".join(str(error).splitlines()))


if __name__ == "__main__":
    main(sys.argv[1:])
