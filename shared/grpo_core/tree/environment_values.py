"""Options of `env-server` that hold several values, and the names that Atropos has for options.

Several named values are `accuracy=1,format=0.3`, or a section of a YAML file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, field_validator


def _pairs(value: Any) -> Any:
    """`a=1,b=x` → {"a": 1, "b": "x"}; a JSON object and a mapping stay as they are."""
    if value is None or isinstance(value, dict):
        return value or {}
    text = str(value).strip()
    if text.startswith("{"):
        try:
            return json.loads(text)
        except ValueError as error:
            raise ValueError(f"not a JSON object: {error}") from error
    import yaml

    found = {}
    for pair in filter(None, text.split(",")):
        name, separator, content = pair.partition("=")
        if not separator or not name.strip():
            raise ValueError(f"expected NAME=VALUE,NAME=VALUE; got {pair!r}")
        found[name.strip()] = yaml.safe_load(content.strip())
    return found


def _numbers(value: Any) -> Any:
    found = _pairs(value)
    for name, number in found.items():
        try:
            if isinstance(number, bool):
                raise ValueError
            found[name] = float(number)  # YAML reads 1e-3 as a text
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: expected a number; got {number!r}") from error
    return found


def _texts(value: Any) -> Any:
    return {name: str(text) for name, text in _pairs(value).items()}


Arguments = Annotated[dict[str, Any], BeforeValidator(_pairs)]
Weights = Annotated[dict[str, float], BeforeValidator(_numbers)]
Columns = Annotated[dict[str, str], BeforeValidator(_texts)]


class MixturePart(BaseModel, frozen=True, extra="forbid"):
    """One task of a mixture. A value that is not given is that of `env-server` itself."""

    task: str = Field(min_length=1)
    name: str | None = None
    weight: float = Field(1.0, gt=0.0, allow_inf_nan=False)
    data: str | None = None
    data_config: str | None = None
    eval_data: str | None = None
    columns: Columns = Field(default_factory=dict)
    system_prompt: str | None = None
    task_args: Arguments = Field(default_factory=dict)

    @field_validator("task")
    @classmethod
    def _not_a_mixture(cls, value: str) -> str:
        if value == MIXTURE:
            raise ValueError("a mixture cannot contain a mixture")
        return value


MIXTURE = "mixture"
AGENT = "agent"
"""The task whose rollouts a program or a function of the user conducts."""
AGENT_OPTIONS: Mapping[str, str] = {
    "agent_command": "command",
    "agent": "function",
    "reward": "reward",
    "agent_calls": "calls",
    "agent_tokens": "tokens",
    "agent_deadline_s": "deadline_s",
    "agent_rollouts": "rollouts",
    "agent_sequences": "sequences",
}
"""Options of the task `agent` → its arguments."""
PYTHON = ("python", "python3")
"""As programs of an agent's command: the Python of `env-server`."""
BRIDGES = ("verifiers", "openenv", "textarena", "harbor")
"""Libraries whose environments are tasks: `verifiers:ENVIRONMENT`."""


def environment_name(environment: str) -> str:
    """For metrics and names of files: `http://host:8000` → `host-8000`, `envs/my_env` → `my_env`,
    `my_env.server.app:app` → `my_env`."""
    if "://" in environment:
        return environment.partition("://")[2].strip("/").replace(":", "-").replace("/", "-")
    if ":" in environment:
        return environment.partition(".")[0]
    return Path(environment).name or Path(environment).resolve().name


UNIFORM, LEARNABLE = "uniform", "learnable"


def rule_name(value: str) -> str:
    """Raises `ValueError` if it names neither a rule nor a function."""
    if value in (UNIFORM, LEARNABLE) or value.endswith(".py") or ":" in value:
        return value
    raise ValueError(
        f"expected {UNIFORM}, {LEARNABLE}, a function in a file such as my.py:sampler, or one in a "
        "module such as package.module:sampler"
    )


def _parts(value: Any) -> Any:
    """`gsm8k=0.7,arithmetic=0.3` → two parts; a list of mappings stays as it is, also in JSON."""
    if isinstance(value, list | tuple) and all(isinstance(word, str) for word in value):
        value = ",".join(value)
    if isinstance(value, str) and value.startswith("["):
        value = json.loads(value)
    if not isinstance(value, str | dict):
        return value or ()
    return [{"task": name, "weight": weight} for name, weight in _numbers(value).items()]


Mixture = Annotated[tuple[MixturePart, ...], BeforeValidator(_parts)]

_ENV = (
    *("group-size", "max-completion-tokens", "temperature", "max-batches-offpolicy"),
    *("max-concurrent-groups", "drop-equal-scores", "data", "data-config", "columns"),
    *("system-prompt", "task-args", "mixture", "reward-weights", "reward-deadline-s"),
    *("max-failed-rewards", "mask-too-long-completions", "eval-every", "eval-data", "held-out"),
    *("eval-items", "eval-samples", "eval-temperature", "eval-handling", "eval-limit-ratio"),
    *("eval-output", "use-wandb", "wandb-name", "weight", "min-batch-allocation", "seed"),
    *("run-api-deadline-s", "trainer-deadline-s", "next-run-deadline-s", "ready-file"),
)
"""Options whose name Atropos has in its section `env`."""

ALIASES: Mapping[str, str] = {
    **{f"env.{name}": name.replace("-", "_") for name in _ENV},
    "command": "agent_command",
    "openai.server-type": "server_type",
    "openai.request-deadline-s": "request_deadline_s",
    "openai.start-deadline-s": "start_deadline_s",
    "env.rollout-server-url": "run_api_url",
    "env.max-token-length": "seq_len",
    "env.total-steps": "steps",
    "env.max-num-workers-per-node": "max_concurrent_groups",
    "env.ensure-scores-are-not-same": "drop_equal_scores",
    "env.tokenizer-name": "tokenizer",
    "tokenizer-name": "tokenizer",
    "env.start-tok-length": "start_completion_tokens",
    "env.steps-per-eval": "eval_every",
    "env.max-eval-workers": "eval_requests",
    "openai.num-requests-for-eval": "eval_requests",
    "env.data-path-to-save-groups": "output",
    "env.inference-weight": "weight",
    "openai.base-url": "inference_url",
    "openai.model-name": "model",
}

WITHOUT_EFFECT = frozenset(
    {
        "env.batch-size",  # the trainer's
        "env.num-rollouts-to-keep",
        "env.num-rollouts-per-group-for-logging",
        "env.min-items-sent-before-logging",
        "env.include-messages",  # always
        "openai.api-key",  # --vllm-api-key
        "openai.num-max-requests-at-once",  # --max-concurrent-groups
        "openai.weight",  # all servers serve one policy
        "openai.rolling-buffer-length",
        "openai.health-check",  # always
        "slurm",
        "testing",
    }
)
"""Options of Atropos that mean nothing here. Any other unknown name is refused."""

REFUSED: Mapping[str, str] = {
    "env.run-evaluation": "write --eval-every 0 to switch evaluation off",
    "env.percent-length-penalty": "write --reward-weights length=1 to punish long completions",
    "format-reward": "write --reward-weights format=0.3",
    "env.format-reward": "write --reward-weights format=0.3",
}
"""Options that do not exist here, and what to write instead."""


def one_policy(servers: list[Any]) -> dict[str, Any]:
    """Merges the servers of an `openai` section. They serve one policy, so only their URLs differ.

    Raises:
        ValueError: they differ in more, or a URL is missing
    """
    if not servers or not all(isinstance(server, dict) for server in servers):
        raise ValueError("openai: expected a non-empty list with one mapping for each server")
    first: dict[str, Any] = servers[0]
    differing = {
        str(key)
        for server in servers
        for key in server.keys() | first.keys()
        if key != "base_url" and server.get(key) != first.get(key)
    }
    if differing:
        raise ValueError(
            f"the servers in the section openai differ in {', '.join(sorted(differing))}; only "
            "base_url may differ, because all servers serve one policy"
        )
    urls = [server["base_url"] for server in servers if "base_url" in server]
    if urls and len(urls) < len(servers):
        raise ValueError("openai: some servers have no base_url; give every server one")
    return first | ({"base_url": urls} if urls else {})
