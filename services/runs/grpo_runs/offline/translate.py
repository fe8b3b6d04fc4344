"""Translates the keys to the options of `grpo` and `env-server`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import yaml

from grpo_core.settings import EXIT_USAGE, CommandSettings, load_settings
from grpo_core.tree.objectives import RECIPES
from grpo_core.tree.trainer_command import CommandLine
from grpo_env.settings import EnvServerSettings
from grpo_runs.offline.backends.choice import Sampling
from grpo_runs.offline.errors import KeysInvalid
from grpo_runs.offline.key_names import ENVIRONMENT_OPTIONS, GRPO_OPTIONS, line_in_keys
from grpo_runs.offline.keys import OfflineKeys

S = TypeVar("S", bound=CommandSettings)

GRPO_FILE, ENV_SERVER_FILE = "grpo.yaml", "env-server.yaml"
"""In the run's directory: the options of the two commands."""
ROOM_FOR_PROMPTS = 1024
"""Tokens of a sequence besides its completion."""
SEQ_LEN = 2048
_MOST_CONCURRENT_GROUPS = 64
_KL_ESTIMATOR = "k2"
_PUBLISH_EVERY = {"lora_only": "adapter_sync_interval"}
_OPEN = {"seq_len", "kl_estimator", "recompute_logprobs", "log_level", "wandb_project"}
"""Options that follow from keys, and that the open sections may replace."""
_NOT_OURS = ("GRPO_", "ENV_SERVER_")


def is_reshaped(keys: OfflineKeys) -> bool:
    """Whether tokens are sampled from another distribution than that of the temperature, so that
    the logged logprobs are not those of the policy."""
    sampling = keys.generation
    return (sampling.top_p, sampling.top_k, sampling.repetition_penalty) != (1.0, 0, 1.0)


def trainer_command(
    keys: OfflineKeys,
    sampling: Sampling,
    directory: Path,
    written_to: Path | None = None,
    *,
    at_start: bool = True,
) -> CommandLine:
    """Options of `grpo`.

    Args:
        directory: of the run
        written_to: directory for the file of options, if it is another one
        at_start: check this machine too
    Raises:
        KeysInvalid: an option is not valid.
    """
    own = grpo_options(keys, sampling, directory)
    _require_open("grpo", keys.grpo, own)
    options = own | keys.grpo
    file = _written((written_to or directory) / GRPO_FILE, options)
    return _loaded(CommandLine, ["--config", str(file)], at_start)


def environment_settings(
    keys: OfflineKeys, directory: Path, *, at_start: bool = True
) -> EnvServerSettings:
    """Options of `env-server`, as `trainer_settings`."""
    own = environment_options(keys)
    _require_open("env_server", keys.env_server, own)
    file = _written(directory / ENV_SERVER_FILE, own | keys.env_server)
    words = [keys.data.task, "serve", "--config", str(file)]
    return _loaded(EnvServerSettings, words, at_start)


def _loaded(kind: type[S], words: Sequence[str], at_start: bool) -> S:
    """Raises `KeysInvalid` with the mistakes, which name the keys that the user gives."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            settings = load_settings(kind, words, _environment(), at_start=at_start)
    except SystemExit as error:
        if error.code != EXIT_USAGE:
            raise
        lines = dict.fromkeys(map(line_in_keys, said.getvalue().splitlines()))
        raise KeysInvalid("\n".join(lines)) from None
    sys.stderr.write(said.getvalue())
    return settings


def seq_len(keys: OfflineKeys) -> int:
    """Longest sequence, in tokens."""
    return max(SEQ_LEN, keys.generation.max_new_tokens + ROOM_FOR_PROMPTS)


def grpo_options(keys: OfflineKeys, sampling: Sampling, directory: Path) -> dict[str, Any]:
    train, steps = keys.train, keys.steps_per_iteration
    mode = sampling.trainer_mode
    options: dict[str, Any] = _values(keys, GRPO_OPTIONS) | {
        "mode": mode,
        "dtype": _dtype(keys, sampling),
        "steps": train.iterations * steps,
        "seq_len": seq_len(keys),
        "save_path": str(directory),
        "metrics_file": str(directory / "metrics.jsonl"),
        "checkpoint_interval": keys.checkpoint.save_interval * steps,
        "state_interval": steps,
    }
    if train.kl_coef and _is_free("kl_estimator", keys) and not _kl_is_in_weights(keys):
        options["kl_estimator"] = _KL_ESTIMATOR
    if train.kl_coef and keys.model.ref_id != keys.model.train_id:
        options["reference_model"] = keys.model.ref_id
    if is_reshaped(keys) or sampling.server == "stock_vllm":
        options["recompute_logprobs"] = True
    if keys.logging.wandb.project:
        options["wandb_project"] = keys.logging.wandb.project
    if mode == "shared_vllm":
        options["verify_every_steps"] = steps
    else:
        options[_PUBLISH_EVERY.get(mode, "vllm_restart_interval")] = steps
    return options


def environment_options(keys: OfflineKeys) -> dict[str, Any]:
    evaluation = keys.eval
    return _values(keys, ENVIRONMENT_OPTIONS) | {
        "seq_len": seq_len(keys),
        "max_concurrent_groups": min(keys.generation.batch_size, _MOST_CONCURRENT_GROUPS),
        "drop_equal_scores": False,
        "eval_temperature": evaluation.temperature if evaluation.do_sample else 0.0,
    }


def _values(keys: OfflineKeys, options: Mapping[str, str]) -> dict[str, Any]:
    return {option: attrgetter(key)(keys) for option, key in options.items()}


def _require_open(section: str, given: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raises `KeysInvalid`: an option is given that follows from other keys."""
    names = {name.replace("-", "_") for name in given}
    if taken := sorted(names & own.keys() - _OPEN):
        raise KeysInvalid(
            f"{', '.join(f'{section}.{name}' for name in taken)}: another key decides this option "
            "(train.*, generation.*, eval.*, data.*, checkpoint.*, model.*); set that key"
        )


def _dtype(keys: OfflineKeys, sampling: Sampling) -> str:
    """Without a server that reports its own, bfloat16 on a GPU and float32 elsewhere."""
    reports_its_own = sampling.server == "ours" or sampling.mode == "sglang"
    if keys.model.dtype != "auto" or reports_its_own:
        return keys.model.dtype
    import torch

    is_on_gpu = keys.model.device.startswith("cuda") or (
        keys.model.device == "auto" and torch.cuda.is_available()
    )
    return "bfloat16" if is_on_gpu else "float32"


def _recipe(keys: OfflineKeys) -> Mapping[str, Any]:
    return RECIPES.get(keys.grpo.get("objective", "grpo"), {})


def _is_free(option: str, keys: OfflineKeys) -> bool:
    """Whether neither the objective nor `grpo` decides it."""
    return option not in keys.grpo and option not in _recipe(keys)


def _kl_is_in_weights(keys: OfflineKeys) -> bool:
    return (keys.grpo.get("kl_in") or _recipe(keys).get("kl_in")) == "weights"


def _written(path: Path, options: Mapping[str, Any]) -> Path:
    """A configuration file of these options. Sections become the text that an option takes."""
    plain = {
        name.replace("_", "-"): json.dumps(value) if isinstance(value, Mapping) else value
        for name, value in options.items()
    }
    path.write_text(yaml.safe_dump(plain, sort_keys=False))
    return path


def _environment() -> dict[str, str]:
    """Variables such as VLLM_API_KEY, but none that would replace a key."""
    return {name: text for name, text in os.environ.items() if not name.startswith(_NOT_OURS)}
