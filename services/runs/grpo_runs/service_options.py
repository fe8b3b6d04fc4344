"""Options of single services: `--trainer.NAME`, `--server.NAME` and `--env.NAME`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

from grpo_core.settings import EXIT_USAGE

TRAINER, SERVER, ENV = "trainer", "server", "env"
SERVICES = (TRAINER, SERVER, ENV)
MODULES = {TRAINER: "grpo_trainer", SERVER: "grpo_vllm", ENV: "grpo_env"}
"""The module that runs each service."""

_URLS = ("run-api-url", "atropos-url", "inference-url", "vllm-url", "vllm-port")
_MODELS = ("model", "model-name", "openai.model-name")
SET_BY_RUNNER: Mapping[str, frozenset[str]] = {
    TRAINER: frozenset(
        {
            *(*_URLS, *_MODELS, "mode", "weight-bridge-mode", "redis-url", "run-id"),
            *("weights-socket", "save-path"),
        }
    ),
    SERVER: frozenset(
        {
            *(*_MODELS, "host", "port", "health-port", "redis-url", "run-id", "share-weights"),
            *("weights-socket", "bridge-config-path", "weights-dir"),
            *("enable-lora", "max-loras", "max-lora-rank"),
        }
    ),
    ENV: frozenset({*_URLS, *_MODELS, "openai.base-url", "env.rollout-server-url"}),
}
"""Options that connect the services with each other."""

MAY_DIFFER = frozenset(
    {"log-level", "debug-loading", "dtype", "max-model-len", "gpu-memory-utilization"}
)
"""Options of a command that may have another value for one service."""
_API_KEYS = ("api-key", "vllm-api-key")

Options = Mapping[str, tuple[str, ...]]
"""Values by option name, which is written with dashes; an option without a value has none."""
_OPTION = re.compile(rf"--({'|'.join(SERVICES)})\.([^=]+)(=.*)?", re.DOTALL)
_MESSAGE = re.compile(r"[\w-]+: --([\w.-]+)(?=:| is )")
_SHOWN_LINES = 3
_DRY_RUN_DEADLINE_S = 60.0


class UnexpectedWord(ValueError):
    """A word of the command line is not an option of a service. Its text is that word."""


def options_by_service(words: Iterable[str], default: str | None = None) -> dict[str, Options]:
    """`--trainer.lr 1e-4 --env.seed=3` → `{"trainer": {"lr": ("1e-4",)}, "env": {"seed": ("3",)}}`.

    The last one counts if an option is given twice.

    Args:
        default: the service of options without the name of a service

    Raises:
        UnexpectedWord: a word is neither an option of a service nor a value of one
    """
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    open_option: tuple[str, str] | None = None
    for word in words:
        if match := _OPTION.fullmatch(_with_service(word, default)):
            service, name, value = match[1], match[2].replace("_", "-"), match[3]
            options = found.setdefault(service, {})
            options.pop(name, None)
            options[name] = () if value is None else (value[1:],)
            open_option = (service, name) if value is None else None
        elif open_option and not word.startswith("--"):
            service, name = open_option
            found[service][name] += (word,)
        else:
            raise UnexpectedWord(word)
    return {service: found[service] for service in SERVICES if service in found}


def _with_service(word: str, default: str | None) -> str:
    """`--lr=1` → `--trainer.lr=1`."""
    is_plain = word.startswith("--") and not _OPTION.fullmatch(word)
    return f"--{default}.{word[2:]}" if default and is_plain else word


def service_words(options: Options) -> list[str]:
    """The options as the service itself takes them."""
    words: list[str] = []
    for name, values in options.items():
        words += [f"--{name}={values[0]}"] if len(values) == 1 else [f"--{name}", *values]
    return words


def words_of_sections(content: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Split the content of a `--config` file into options of services and the rest.

    Sections `trainer: {max-staleness: 4}` and keys `trainer.max-staleness: 4` mean the same.
    """
    words: list[str] = []
    rest: dict[str, Any] = {}
    for key, value in content.items():
        service, dot, name = str(key).partition(".")
        if service not in SERVICES:
            rest[key] = value
        elif dot:
            words += _words_of(service, name, value)
        elif isinstance(value, Mapping):
            for name, item in value.items():
                words += _words_of(service, str(name), item)
        else:
            raise ValueError(
                f"{key}: expected a section with one option per line, for example "
                "`max-staleness: 4`"
            )
    return words, rest


def section(options: Options) -> dict[str, Any]:
    """The options as they stand in a YAML file; the inverse of `words_of_sections`."""
    return {
        name: True if not values else values[0] if len(values) == 1 else list(values)
        for name, values in options.items()
    }


def options_set_elsewhere(
    service: str, options: Options, prog: str, own: Iterable[str], default: str | None = None
) -> Iterator[str]:
    """A message per option that `prog` sets itself.

    Args:
        own: its own options, with dashes
        default: the service of options without the name of a service
    """
    own = set(own) - MAY_DIFFER
    prefix = "" if service == default else f"{service}."
    for name, values in options.items():
        if (service, name) == (TRAINER, "world-size") and values != ("1",):
            yield f"--{prefix}{name}: {prog} starts one trainer process; omit it"
        elif name in _API_KEYS and "run-api-token" in own:
            yield f"--{service}.{name}: {prog} sets this option; write --run-api-token"
        elif name in own:
            yield f"--{service}.{name}: {prog} sets this option; write --{name}"
        elif name in SET_BY_RUNNER[service]:
            yield f"--{prefix}{name}: {prog} sets this option itself; omit it"


def mistakes_in(
    service: str,
    options: Options,
    arguments: Sequence[str],
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Messages of the service's own `--dry-run` with these options; empty if it accepts them.

    Args:
        arguments: further words that the service requires
    """
    done = _dry_run(service, [*arguments, *service_words(options)], environment)
    if done.returncode == 0:
        return []
    lines = [line for line in done.stderr.strip().splitlines() if ": ignored" not in line]
    return [_named_here(service, options, line) for line in lines[-_SHOWN_LINES:]]


@cache
def trainer_has(name: str) -> bool:
    """True if `grpo` has this option, under any of its names."""
    done = _dry_run(TRAINER, [f"--{name}="])
    answered = done.returncode in (0, EXIT_USAGE)
    return answered and f"--{name}: no such option" not in done.stderr


def _dry_run(
    service: str,
    words: Sequence[str],
    environment: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", MODULES[service], *words, "--dry-run"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=_DRY_RUN_DEADLINE_S,
    )


def _named_here(service: str, options: Options, line: str) -> str:
    """`grpo: --lr: expected ...` → `--trainer.lr: expected ...`."""
    match = _MESSAGE.match(line)
    if match is None or match[1] not in options:
        return f"{service}: {line}"
    rest = re.sub(r"\b(did you mean|or) --", rf"\1 --{service}.", line[match.end() :])
    return f"--{service}.{match[1]}{rest}"


def _words_of(service: str, name: str, value: Any) -> list[str]:
    option = f"--{service}.{name}"
    if value is None:
        return []
    if isinstance(value, bool):
        return [option if value else f"--{service}.no-{name}"]
    return [option, *map(str, value)] if isinstance(value, list) else [f"{option}={value}"]
