"""The YAML file of `env-server`, in our words or in those of Atropos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RENAMED: Mapping[str, str] = {
    "ensure_scores_are_not_same": "drop_equal_scores",
    "inference_weight": "weight",
    "max_num_workers_per_node": "max_concurrent_groups",
}
"""Keys of `env` that Atropos calls otherwise."""

WITHOUT_EFFECT: Mapping[str, frozenset[str]] = {
    "env": frozenset(
        {
            "batch_size",  # the trainer's
            "start_tok_length",
            "steps_per_eval",
            "eval_handling",
            "eval_limit_ratio",
            "max_eval_workers",
            "use_wandb",  # the trainer reports
            "num_rollouts_to_keep",
            "num_rollouts_per_group_for_logging",
            "min_items_sent_before_logging",
            "include_messages",  # always
        }
    ),
    "openai": frozenset(
        {
            "num_max_requests_at_once",  # env.max_concurrent_groups
            "num_requests_for_eval",
            "rolling_buffer_length",
            "health_check",  # always
        }
    ),
    "": frozenset({"slurm", "testing"}),
}
"""Keys of Atropos, by section, that mean nothing here. Anything else unknown is refused."""


class ConfigFileUnusable(Exception):
    """The file cannot be read as settings. Ends in a usage error."""


@dataclass(frozen=True)
class ConfigFile:
    """`without_effect` names the keys of Atropos that were left out of `sections`."""

    sections: dict[str, Any]
    without_effect: list[str]


def config_argument(argv: Sequence[str]) -> Path | None:
    """The file must be known before the command line is parsed: it is a source beside it."""
    for position, word in enumerate(argv):
        if word == "--config" and position + 1 < len(argv):
            return Path(argv[position + 1])
        if word.startswith("--config="):
            return Path(word.removeprefix("--config="))
    return None


def read_config_file(path: Path) -> ConfigFile:
    """Raises `ConfigFileUnusable`. What the keys hold is checked with the command line's."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigFileUnusable(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigFileUnusable(f"{path}: expected a mapping with the sections env and openai")
    if isinstance(content.get("openai"), list):
        content["openai"] = _one_policy(path, content["openai"])
    without_effect = _drop_without_effect(content)
    if isinstance(content.get("env"), dict):
        content["env"] = {RENAMED.get(key, key): value for key, value in content["env"].items()}
    return ConfigFile(content, without_effect)


def _one_policy(path: Path, servers: list[Any]) -> dict[str, Any]:
    """Several servers of one policy: they may differ in their URL alone."""
    if not servers or not all(isinstance(server, dict) for server in servers):
        raise ConfigFileUnusable(f"{path}: openai: expected at least one server, each a mapping")
    first: dict[str, Any] = servers[0]
    differing = {
        str(key)
        for server in servers
        for key in server.keys() | first.keys()
        if key != "base_url" and server.get(key) != first.get(key)
    }
    if differing:
        raise ConfigFileUnusable(
            f"{path}: the servers under openai differ in {', '.join(sorted(differing))}; all of "
            "them serve one policy, so they may differ in base_url alone"
        )
    urls = [server["base_url"] for server in servers if "base_url" in server]
    if urls and len(urls) < len(servers):
        raise ConfigFileUnusable(f"{path}: a server under openai has no base_url, others have one")
    return first | ({"base_url": urls} if urls else {})


def _drop_without_effect(content: dict[str, Any]) -> list[str]:
    dropped = []
    for section, ignored in WITHOUT_EFFECT.items():
        keys = content.get(section) if section else content
        if not isinstance(keys, dict):
            continue
        for key in sorted(ignored & keys.keys()):
            del keys[key]
            dropped.append(f"{section}.{key}" if section else key)
    return dropped
