"""Builds the settings of the trainer and of the environments from the keys of a run."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import sys
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from grpo_core.settings import CommandSettings, Given, OptionsInvalid, settings_of
from grpo_core.settings.options import options_of
from grpo_core.settings.sources import read_keys, read_variables
from grpo_core.tree.objectives import PRESETS
from grpo_core.tree.trainer_command import CommandLine
from grpo_env.settings import EnvServerSettings
from grpo_runs.offline.errors import KeysInvalid
from grpo_runs.offline.keys import KEYS, OfflineKeys, in_keys, mistakes_of, sets_of
from grpo_runs.offline.servers import Sampling

S = TypeVar("S", bound=CommandSettings)

ROOM_FOR_PROMPTS = 1024
"""Tokens of a sequence besides its completion."""
SEQ_LEN = 2048
_MOST_CONCURRENT_GROUPS = 64
_KL_ESTIMATOR = "k2"
_RANK_DEADLINE_S = 7 * 24 * 3600.0
"""The others wait while rank 0 samples and evaluates, which may take hours. They notice by the
heartbeat if it is lost."""
_PUBLISH_EVERY = {"lora_only": "adapter_sync_interval"}
_SIZES = "data.problems_per_iteration"
_OPEN = {"seq_len", "kl_estimator", "recompute_logprobs", "log_level", "wandb_project"}
"""Options that follow from keys, and that the open sections may replace."""
_ONLINE = {"weight_transport": "offline runs publish weights as files; omit this key"}
"""Options that only runs with run-api have."""
_NOT_OURS = ("GRPO_", "ENV_SERVER_")


def checked(content: Mapping[str, Any], directory: Path) -> OfflineKeys:
    """The keys of a run, whose server is not asked yet.

    Raises:
        KeysInvalid: with a line for each mistake in any key.
    """
    lines: list[str] = []
    try:
        keys = OfflineKeys.model_validate(content)
    except ValidationError as error:
        lines += mistakes_of(error)
        if not all(problem["loc"] for problem in error.errors()):
            raise KeysInvalid("\n".join(lines)) from error
        keys = OfflineKeys.model_validate(_without(content, error))
    mode = "shared_vllm" if keys.sync.mode == "auto" else keys.sync.mode
    with contextlib.redirect_stderr(io.StringIO()):  # the run itself notes what has no effect
        lines += option_mistakes(keys, Sampling("ours", mode), directory)
    if lines:
        raise KeysInvalid("\n".join(dict.fromkeys(lines)))
    return keys


def option_mistakes(
    keys: OfflineKeys, sampling: Sampling, directory: Path, *, at_start: bool = True
) -> list[str]:
    """A line for each mistake in the options of both commands. Args: as of `trainer_command`"""
    lines: list[str] = []
    for check in (
        lambda: trainer_command(keys, sampling, directory, at_start=at_start),
        lambda: environment_settings(keys, at_start=at_start),
    ):
        try:
            check()
        except KeysInvalid as error:
            lines += str(error).splitlines()
    return lines


def _without(content: Mapping[str, Any], error: ValidationError) -> dict[str, Any]:
    """The keys that are valid."""
    kept = copy.deepcopy(dict(content))
    for problem in error.errors():
        section: Any = kept
        for name in problem["loc"]:
            inner = section.get(name)
            if not isinstance(inner, dict) or name == problem["loc"][-1]:
                section.pop(name, None)
                break
            section = inner
    return kept


def is_reshaped(keys: OfflineKeys) -> bool:
    """Whether tokens are sampled from another distribution than that of the temperature, so that
    the logged logprobs are not those of the policy."""
    sampling = keys.generation
    return (sampling.top_p, sampling.top_k, sampling.repetition_penalty) != (1.0, 0, 1.0)


def seq_len(keys: OfflineKeys) -> int:
    """Longest sequence, in tokens."""
    return max(SEQ_LEN, keys.generation.max_new_tokens + ROOM_FOR_PROMPTS)


def trainer_command(
    keys: OfflineKeys, sampling: Sampling, directory: Path, *, at_start: bool = True
) -> CommandLine:
    """Options of `grpo`.

    Args:
        directory: of the run
        at_start: check this machine too
    Raises:
        KeysInvalid: options are not valid, with a line for each.
    """
    train, steps, mode = keys.train, keys.steps_per_iteration, sampling.trainer_mode
    own = _same("grpo", keys) | {
        "mode": Given(mode, "sync.mode"),
        "dtype": Given(_dtype(keys, sampling), "model.dtype"),
        "steps": Given(train.iterations * steps, "train.iterations"),
        "seq_len": Given(seq_len(keys), "generation.max_new_tokens"),
        "save_path": Given(directory, "hydra.run.dir"),
        "metrics_file": Given(directory / "metrics.jsonl", "hydra.run.dir"),
        "checkpoint_interval": Given(
            keys.checkpoint.save_interval * steps, "checkpoint.save_interval"
        ),
        "state_interval": Given(steps, _SIZES),
    }
    kl_in = keys.grpo.get("kl_in") or _preset(keys).get("kl_in")
    if train.kl_coef and _is_free("kl_estimator", keys) and kl_in != "weights":
        own["kl_estimator"] = Given(_KL_ESTIMATOR, "train.kl_coef")
    if train.kl_coef and keys.model.ref_id != keys.model.train_id:
        own["reference_model"] = Given(keys.model.ref_id, "model.ref_id")
    if is_reshaped(keys) or sampling.server == "stock_vllm":
        own["recompute_logprobs"] = Given(True, "generation.top_p")
    if _is_free("rank_deadline_s", keys):
        own["rank_deadline_s"] = Given(_RANK_DEADLINE_S, _SIZES)
    if keys.logging.wandb.project:
        own["wandb_project"] = Given(keys.logging.wandb.project, "logging.wandb.project")
    every = _PUBLISH_EVERY.get(mode, "vllm_restart_interval")
    own["verify_every_steps" if mode == "shared_vllm" else every] = Given(steps, _SIZES)
    return _settings(CommandLine, "grpo", own, keys.grpo, at_start)


def environment_settings(keys: OfflineKeys, *, at_start: bool = True) -> EnvServerSettings:
    """Options of `env-server`, as `trainer_command`."""
    evaluation, requests = keys.eval, keys.generation.batch_size
    own = _same("env_server", keys) | {
        "seq_len": Given(seq_len(keys), "generation.max_new_tokens"),
        "max_concurrent_groups": Given(
            min(requests, _MOST_CONCURRENT_GROUPS), "generation.batch_size"
        ),
        "drop_equal_scores": Given(False, "data.rollouts_per_problem"),
        "eval_temperature": Given(
            evaluation.temperature if evaluation.do_sample else 0.0, "eval.temperature"
        ),
    }
    return _settings(EnvServerSettings, "env_server", own, keys.env_server, at_start)


def _same(section: str, keys: OfflineKeys) -> dict[str, Given]:
    """The options that get the value of a key."""
    return {
        option.partition(".")[2]: Given(attrgetter(path)(keys), path)
        for path, field in KEYS.items()
        for option in sets_of(field).same
        if option.startswith(f"{section}.")
    }


def _settings(
    kind: type[S],
    section: str,
    own: Mapping[str, Given],
    opened: Mapping[str, Any],
    at_start: bool,
) -> S:
    """Read the options of a section as its command does.

    Args:
        own: options that other keys decide
        opened: options that the section gives
    """
    given = read_keys(kind, [(name, one, f"{section}.{name}") for name, one in opened.items()])
    taken = given.values.keys() & own.keys() - _OPEN
    problems = [
        *given.problems,
        *(
            f"{given.values[one].name}: {own[one].name} decides this option; set that key"
            for one in taken
        ),
        *(f"{given.values[one].name}: {_ONLINE[one]}" for one in given.values.keys() & _ONLINE),
        *(
            f"{held.name}: files of the run show every key, and this one is a secret; set the "
            f"variable {kind.command.variable(one)} instead"
            for one, held in given.values.items()
            if options_of(kind)[one].is_secret
        ),
    ]
    if given.without_effect:
        ignored = ", ".join(f"{section}.{name}" for name in given.without_effect)
        sys.stderr.write(f"ignored these keys, which have no effect: {ignored}\n")
    # Variables such as VLLM_API_KEY, but none that would replace a key.
    of_others = {name: one for name, one in os.environ.items() if not name.startswith(_NOT_OURS)}
    variables = read_variables(kind.command, options_of(kind), of_others, own)
    values = {**variables.values, **own, **given.values}
    try:
        return settings_of(kind, values, of_others, at_start, problems)
    except OptionsInvalid as error:
        lines = [in_keys(line, section) for line in error.lines]
        raise KeysInvalid("\n".join(dict.fromkeys(lines))) from None


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


def _preset(keys: OfflineKeys) -> Mapping[str, Any]:
    return PRESETS.get(keys.grpo.get("objective", "grpo"), {})


def _is_free(option: str, keys: OfflineKeys) -> bool:
    """Whether neither the objective nor `grpo` decides it."""
    return option not in keys.grpo and option not in _preset(keys)
