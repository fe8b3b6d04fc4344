"""Describes a command: a pydantic model for its options, and a `Command` record for the rest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, WrapValidator

from grpo_core.service_url import ServiceUrl

if TYPE_CHECKING:
    from grpo_core.settings.sources import Given

SHARED_VARIABLES: Mapping[str, str] = {
    "redis_url": "REDIS_URL",
    "run_id": "RUN_ID",
    "run_api_token": "RUN_API_TOKEN",
    "vllm_api_key": "VLLM_API_KEY",
    "teacher_api_key": "TEACHER_API_KEY",
}
"""Fields that every command which has them also reads from these variables."""
URL_VARIABLES: Mapping[str, str] = {
    name: f"GRPO_{name.upper()}" for name in ("run_api_url", "inference_url", "teacher_url")
}
"""Those of a URL with a password, which other users could read on a command line."""
_SECRET_VARIABLES = frozenset(
    {*SHARED_VARIABLES.values(), *URL_VARIABLES.values()} - {"RUN_ID"}
    | {"WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}
)
_OF_SERVICES = re.compile(r"(GRPO|RUN_API)_.*(TOKEN|KEY|PASSWORD|SECRET|URL)")


def holds_secret(variable: str) -> bool:
    """Whether a variable that this project's commands read may hold a secret, or name its file."""
    name = variable.removesuffix("_FILE")
    return name in _SECRET_VARIABLES or _OF_SERVICES.fullmatch(name) is not None


@dataclass(frozen=True)
class Shown:
    """Annotation of a field: texts of `--help` that its type and default do not give.

    Args:
        default: the value that applies if the option is not given, for example "by task: 8 or 256"
    """

    default: str | None = None
    metavar: str | None = None


@dataclass(frozen=True)
class Alias:
    """Another name of an option.

    Args:
        convert: turns a value of the alias into one of the option, or raises `ValueError`
        yields: the alias has no effect if the option is given under another name
        is_flag: the alias takes no value; `convert` then gets "true" or "false"
        is_negated: the name `--no-NAME` of a flag
    """

    field: str
    convert: Callable[[Any], Any] | None = None
    yields: bool = False
    is_flag: bool = False
    is_negated: bool = False


def flag_for(field: str, value: str) -> Alias:
    """A flag that means the option `field` with this value."""

    def convert(given: Any) -> str:
        if str(given).lower() != "true":
            raise ValueError(f"this option accepts no value except true; got {str(given)!r}")
        return value

    return Alias(field, convert, is_flag=True)


@dataclass(frozen=True)
class Command:
    """Describes a command beside its options. Names are written with dashes, fields with
    underscores.

    Args:
        env_prefix: prefix of its environment variables; none are read if it is empty
        variables: fields that are also read from a variable without the prefix
        groups: headings of `--help` and the fields below each, in this order
        examples: command lines at the end of `--help`
        positional: fields given without an option name
        aliases: further names of options
        without_effect: names that are accepted, reported and ignored
        refused: names that do not exist here, and what to do instead
        passes_on: field that receives all words that are not options of this command
        passes_on_below: only those that begin with this, for example "server."; it is taken off
        sections: the groups are sections of a file, named as their headings
        defaults: texts for options whose default is another than the field's
        brief: fields that `--help` only names, since another command describes them
        others: names that are passed on although they resemble options of this command
        left_out: fields of other commands that are no options of this one
    """

    prog: str
    env_prefix: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    examples: tuple[str, ...] = ()
    positional: tuple[str, ...] = ()
    aliases: Mapping[str, str | Alias] = field(default_factory=dict)
    without_effect: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)
    passes_on: str | None = None
    passes_on_below: str = ""
    sections: bool = False
    defaults: Mapping[str, str] = field(default_factory=dict)
    brief: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()

    def alias(self, name: str) -> Alias | None:
        found = self.aliases.get(name)
        return Alias(found) if isinstance(found, str) else found

    def variable(self, field: str) -> str | None:
        """The variable without the prefix, if there is one."""
        return self.variables.get(field) or SHARED_VARIABLES.get(field)


class Mistake(NamedTuple):
    """`field`: the option to blame; None if there are several, which `message` then names."""

    field: str | None
    message: str


class CommandSettings(BaseModel, frozen=True, extra="forbid", coerce_numbers_to_str=True):
    """Base of every command's settings. The docstring of a subclass is its `--help` text."""

    command: ClassVar[Command]

    @classmethod
    def prepare_file(cls, content: dict[str, Any]) -> dict[str, Any]:
        """Hook: bring the content of a `--config` file into keys that are option names.

        Raises:
            ValueError: with a message for the user
        """
        return content

    @classmethod
    def drop_unused(
        cls,
        given: dict[str, Given],  # noqa: ARG003
        environment: Mapping[str, str],  # noqa: ARG003
    ) -> Iterator[str]:
        """Hook: remove values that have no effect, and yield a line for the user about them. The
        hook may also add values that a variable stands for.

        Args:
            given: the values by field, before they are checked
        Raises:
            ValueError: with a message for the user
        """
        yield from ()

    def mistakes(self) -> Iterator[Mistake]:
        """Hook: mistakes that no single field shows, such as options that exclude each other."""
        yield from ()

    def start_mistakes(self) -> Iterator[Mistake]:
        """Hook: mistakes that depend on this machine, such as a directory that does not exist."""
        yield from ()

    def resolved(self) -> dict[str, Any]:
        """Hook: the values that `--dry-run` prints, by field."""
        return dict(self)


T = TypeVar("T")


_Level = Literal["DEBUG", "INFO", "WARNING", "ERROR"]


def _level(value: Any) -> Any:
    upper = str(value).upper()
    return upper if upper in get_args(_Level) else value


LogLevel = Annotated[_Level, BeforeValidator(_level)]
"""In capitals; lower case is accepted."""


def split_at_commas(value: Any) -> Any:
    if value is None:
        return None
    words = [value] if isinstance(value, str | int | float) else value
    return [part for word in words for part in _parts(word)]


def _parts(word: Any) -> list[str]:
    return [word] if isinstance(word, ServiceUrl) else str(word).replace(",", " ").split()


CommaSeparated = Annotated[tuple[T, ...], BeforeValidator(split_at_commas)]
"""`a,b`, `a b` or a YAML list."""


def _http_url(value: Any, as_text: Callable[[Any], str]) -> ServiceUrl:
    try:
        parts = urlsplit(as_text(value))
        is_usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise ValueError("expected a URL such as http://localhost:8000")
    return ServiceUrl(value)


HttpUrl = Annotated[str, WrapValidator(_http_url)]
"""Its values are of the type `ServiceUrl`."""
InferenceUrl = Annotated[HttpUrl, AfterValidator(lambda value: value.root)]
"""URL of an inference server. OpenAI clients write it with /v1 at its end."""
