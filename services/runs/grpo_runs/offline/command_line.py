"""The words of the command line, and the keys that they give to one job."""

from __future__ import annotations

import copy
import os
import signal
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, get_origin

from grpo_runs.offline.errors import KeysInvalid, RunUnusable
from grpo_runs.offline.keys import FOLLOWS, KEYS, SECTIONS, OfflineKeys, put, value_of
from grpo_runs.offline.run_files import resumed_keys
from grpo_runs.offline.translate import checked

EXIT_FAILED, EXIT_USAGE = 1, 2
_MULTIRUN = ("-m", "--multirun")
_OPEN_SECTIONS = tuple(f"{name}." for name in SECTIONS)
_RESUME, _DIRECTORY = "checkpoint.resume", "hydra.run.dir"

_SIZES = (
    *("data.problems_per_iteration", "data.rollouts_per_problem"),
    *("train.batch_size", "train.grad_accum_steps"),
)
"""A checkpoint counts optimizer steps, so an iteration must keep its number of them."""


def words_for_hydra(words: Sequence[str]) -> list[str]:
    """- `-m train.lr='[1e-5,2e-5]'`: a list for a key that takes one value becomes choices.
    - `grpo.objective=dapo`: keys of the open sections are added.
    - `checkpoint.resume=DIR`: the run goes on in its directory.

    Raises:
        KeysInvalid: keys do not exist; a list for a key that takes one value, without -m; a key
            that is removed.
        RunUnusable: checkpoint.resume is not the directory of a run.
    """
    names = [word.partition("=")[0] for word in words if "=" in word and word[0] not in "-~"]
    if unknown := [name for name in names if not _is_key(name.lstrip("+"))]:
        raise KeysInvalid("\n".join(map(_no_such_key, unknown)))
    is_sweep = any(word in _MULTIRUN for word in words)
    found = [*_prepared(words, is_sweep)]
    resumed = [_unquoted(w.partition("=")[2]) for w in words if w.startswith(f"{_RESUME}=")]
    if resumed and resumed[-1] not in ("", "null"):
        directory = Path(resumed[-1]).absolute()
        resumed_keys(directory)  # a mistyped name must not make a directory
        if not is_sweep and not any(word.startswith(_DIRECTORY) for word in words):
            found.append(f"{_DIRECTORY}={_quoted(str(directory))}")
    return found


def _is_key(name: str) -> bool:
    is_section = any(path.startswith(f"{name}.") for path in KEYS)
    return name in KEYS or is_section or name.startswith((*_OPEN_SECTIONS, "hydra"))


def _no_such_key(name: str) -> str:
    near = get_close_matches(name, KEYS, n=1, cutoff=0.8)
    hint = f"did you mean {near[0]}?" if near else "conf/offline_grpo.yaml lists all keys"
    return f"{name}: no such key; {hint}"


def _unquoted(value: str) -> str:
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if is_quoted else value


def _quoted(value: str) -> str:
    """For Hydra's grammar, in which =, commas and brackets have a meaning."""
    return "'" + value.replace("'", "\\'") + "'"


def _prepared(words: Sequence[str], is_sweep: bool) -> Iterator[str]:
    for word in words:
        name, separator, value = word.partition("=")
        if name.startswith("~"):
            raise KeysInvalid(f"{word}: every key has a value; write KEY=VALUE")
        if not separator or name.startswith(("-", "hydra")):
            yield word
        elif name == _RESUME and value not in ("", "null"):
            yield f"{name}={_quoted(_unquoted(value))}"
        elif name.startswith(_OPEN_SECTIONS):
            is_list = is_sweep and value.startswith("[")
            yield f"++{name}={','.join(_choices(value)) if is_list else value}"
        elif value.startswith("[") and _takes_one_value(name):
            if not is_sweep:
                raise KeysInvalid(
                    f"{word}: {name} takes one value. To run one job for each value of the list, "
                    f"add -m: python run_offline_grpo.py -m {name}='{value}'"
                )
            yield f"{name}={','.join(_choices(value))}"
        else:
            yield word


def _choices(value: str) -> list[str]:
    return [part.strip() for part in value.strip().strip("[]").split(",")]


def _takes_one_value(name: str) -> bool:
    return name in KEYS and get_origin(KEYS[name].annotation) not in (tuple, dict)


def given_names(overrides: Sequence[str]) -> list[str]:
    """The keys that the command line gives, for example `train.lr`."""
    return [word.lstrip("+").partition("=")[0] for word in overrides]


def job_keys(composed: Mapping[str, Any], given: Collection[str], directory: Path) -> OfflineKeys:
    """Check the keys of a job, and take those of the run that it continues.

    Args:
        composed: every key with its value
        given: the keys that the command line gives; of a run that goes on, all others stay
        directory: of the run

    Raises:
        KeysInvalid: values are not valid.
        RunUnusable: `checkpoint.resume` is not the directory of a run.
    """
    resume = composed.get("checkpoint", {}).get("resume")
    content = dict(composed)
    if resume is not None:
        earlier = resumed_keys(Path(resume))
        content = copy.deepcopy(earlier)
        for name in given:
            put(content, name, value_of(composed, name))
        for name, source in FOLLOWS.items():
            if name not in given and value_of(earlier, name) == value_of(earlier, source):
                put(content, name, value_of(content, source))
        if changed := [n for n in _SIZES if value_of(earlier, n) != value_of(content, n)]:
            raise RunUnusable(
                f"checkpoint.resume: {', '.join(changed)} differs from that of the run, which "
                "counts in optimizer steps; leave it out, or start a new run from its final_model"
            )
    keys = checked(content, directory)
    if keys.logging.wandb.run_name:
        os.environ["WANDB_NAME"] = keys.logging.wandb.run_name
    return keys


def exit_on_signals() -> None:
    """End with status 128 + n after signal n, and clean up."""

    def end_with(number: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end_with)


def end(prog: str, status: int, message: str) -> NoReturn:
    sys.stderr.write(f"{prog}: {message}\n")
    raise SystemExit(status)
