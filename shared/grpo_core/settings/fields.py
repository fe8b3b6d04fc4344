"""Types of fields that several commands share."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator

T = TypeVar("T")


_Level = Literal["DEBUG", "INFO", "WARNING", "ERROR"]


def _level(value: Any) -> Any:
    upper = str(value).upper()
    return upper if upper in get_args(_Level) else value


LogLevel = Annotated[_Level, BeforeValidator(_level)]
"""In capitals; lower case is accepted."""


def _split(value: Any) -> Any:
    if value is None:
        return None
    words = [value] if isinstance(value, str | int | float) else value
    return [part for word in words for part in str(word).replace(",", " ").split()]


CommaSeparated = Annotated[tuple[T, ...], BeforeValidator(_split)]
"""`a,b`, `a b` or a YAML list."""


def _http_url(value: str) -> str:
    try:
        parts = urlsplit(value)
        is_usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise ValueError("expected a URL such as http://localhost:8000")
    return value


HttpUrl = Annotated[str, AfterValidator(_http_url)]


def _without_v1(value: str) -> str:
    return value.rstrip("/").removesuffix("/v1")


InferenceUrl = Annotated[HttpUrl, AfterValidator(_without_v1)]
"""URL of an inference server. OpenAI clients write it with /v1 at its end."""
