"""Reads the tool calls in a message, in the forms of the families of models.

These are the forms that vLLM's parsers `hermes`, `qwen3_coder`, `llama3_json` and `mistral` read.
They are read here, because an environment has no vLLM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NotRequired, TypedDict

from grpo_env.maths.final_answer import END_OF_THINKING, THINK_TAG

CALL, END_OF_CALL = "<tool_call>", "</tool_call>"
_FENCE = re.compile(r"```(?:json)?\s*")
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_PYTHON_TAG, _CALLS = "<|python_tag|>", "[TOOL_CALLS]"
_OF_OTHERS = (
    *("<arg_key>", "<|tool_call_start|>", "<|tool_list_start|>", "<|tool_call>", "<|call|>"),
    *("<|tool_call_begin|>", "<|tool_calls_section_begin|>", "<tool_calls>", "Action: ```json"),
    *("<\uff5ctool\u2581call", "<|START_ACTION|>"),
)
"""Marks of forms that are not read here: GLM, LFM2, Gemma 4, gpt-oss, Kimi, Hunyuan, Cohere,
DeepSeek."""
_NAME = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")
_MOST_CALLS = 64
"""Of one message. An error of JSON counts lines from the beginning of the text."""
_DECODER = json.JSONDecoder(strict=False)  # a model writes line breaks into strings

IsText = Callable[[str, str, str], bool]
"""Whether what is written for the parameter of a tool, by both names, is a text. All else is
JSON."""


class Message(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str
    name: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]


THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message of the assistant, of which one may hold its thought (Qwen and DeepSeek,
gpt-oss, vLLM). A chat template reads one of them, or none."""


class CallFormat(StrEnum):
    """How a family of models writes calls."""

    TAGS = "tags"
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen2.5, Qwen3, SmolLM3), or
    `<tool_call><function=name><parameter=key>…</parameter></function></tool_call>` (Qwen3-Coder,
    Qwen3.5, Nemotron 3)."""
    LLAMA3 = "llama3"
    """The whole message is `{"name": …, "parameters": {…}}`; several are separated by `;`."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}]`, or `[TOOL_CALLS]name[ARGS]{…}`."""


@dataclass(frozen=True)
class ToolCall:
    """One call in a message. `error`: why it is no valid call; None if it is one. `written`:
    arguments that are no object."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    written: Any = None


def format_of(template: str) -> CallFormat | None:
    """The form that a chat template asks for; None for one that is not read here. Without a known
    mark, the model was taught in another way than by its template: then `TAGS`."""
    if any(mark in template for mark in _OF_OTHERS):
        return None
    if CALL in template:
        return CallFormat.TAGS
    if _CALLS in template:
        return CallFormat.MISTRAL
    if "<|start_header_id|>" in template:
        return CallFormat.LLAMA3
    return CallFormat.TAGS


def tool_calls(text: str, is_text: IsText = lambda *_: False) -> list[ToolCall]:
    """The calls in a message, in their order. An invalid one has an error.

    Args: text: an `Answer` names the family; in any other text, every form counts
    """
    return divided_by_calls(text, is_text)[1]


def divided_by_calls(text: str, is_text: IsText = lambda *_: False) -> tuple[str, list[ToolCall]]:
    """What stands before the first call, and the calls. Calls in a thought are drafts."""
    whole = getattr(text, "opening", "") + text
    if whole.rfind(THINK_TAG) > whole.rfind(END_OF_THINKING):  # it ends in a thought
        return str(text), []
    said = text.rpartition(END_OF_THINKING)[2]
    wanted = getattr(text, "call_format", None)
    for form, read in _READERS.items():
        if wanted in (None, form) and (found := read(said, is_text)):
            return text[: len(text) - len(said) + found[0]], found[1]
    return str(text), []


Found = tuple[int, list[ToolCall]]


def _of_tags(text: str, is_text: IsText) -> Found | None:
    calls: list[ToolCall] = []
    first = at = text.find(CALL)
    while at >= 0 and len(calls) < _MOST_CALLS:
        at = _after_block(text, at + len(CALL), is_text, calls)
        at = text.find(CALL, at)
    return (first, calls) if calls else None


def _after_block(text: str, at: int, is_text: IsText, calls: list[ToolCall]) -> int:
    """Add the calls of a block; returns where it ends."""
    if function := _FUNCTION.match(text, at):
        end = _end(text, at)
        calls.append(_of_xml(function[1].strip(), text[function.end() : end], is_text))
        return end
    try:
        values, at = _values(text, at, "\n,")
    except (ValueError, RecursionError):
        calls.append(ToolCall(error="the call is not JSON"))
        return _end(text, at)
    calls += [_of_json(value) for value in values]
    return at


def _end(text: str, at: int) -> int:
    end = text.find(END_OF_CALL, at)
    return len(text) if end < 0 else end


def _values(text: str, at: int, separators: str) -> tuple[list[Any], int]:
    """JSON values from a place on; lists count as their elements. Raises `ValueError`."""
    values: list[Any] = []
    while True:
        while at < len(text) and (text[at].isspace() or (values and text[at] in separators)):
            at += 1
        if fence := _FENCE.match(text, at):
            at = fence.end()
            continue
        if values and (at >= len(text) or text[at] not in "{["):
            return values, at
        value, at = _DECODER.raw_decode(text, at)
        values += value if isinstance(value, list) and value else [value]


def _of_json(found: Any) -> ToolCall:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return ToolCall(error="the call has no name")
    arguments = found.get("arguments", found.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError):
            return ToolCall(found["name"], error="the arguments are not JSON")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        error = "the arguments are not an object"
        return ToolCall(found["name"], error=error, written=arguments)
    return ToolCall(found["name"], arguments)


def _of_xml(name: str, body: str, is_text: IsText) -> ToolCall:
    arguments: dict[str, Any] = {}
    for part in body.split("<parameter=")[1:]:
        key, closed, rest = part.partition(">")
        if not closed:
            return ToolCall(name, error="a parameter has no name")
        value = rest.partition("</parameter>")[0].removeprefix("\n").removesuffix("\n")
        arguments[key.strip()] = value if is_text(name, key.strip(), value) else _of_text(value)
    return ToolCall(name, arguments)


def _of_text(value: str) -> Any:
    try:
        return _DECODER.decode(value)
    except (ValueError, RecursionError):
        return value


def _of_llama(text: str, _is_text: IsText) -> Found | None:
    said = text.lstrip()
    start = len(text) - len(said)
    begin = said.removeprefix(_PYTHON_TAG).lstrip()
    if not begin.startswith("{"):
        return None
    try:
        values, end = _values(begin, 0, ";,")
    except (ValueError, RecursionError):
        is_call = begin.startswith('{"name"')
        return (start, [ToolCall(error="the call is not JSON")]) if is_call else None
    is_call = all(isinstance(v, dict) and {"parameters", "arguments"} & v.keys() for v in values)
    is_whole = not begin[end:].strip()
    return (start, [_of_json(value) for value in values]) if is_call and is_whole else None


def _of_mistral(text: str, _is_text: IsText) -> Found | None:
    before, mark, behind = text.partition(_CALLS)
    if not mark:  # a special token, which the text of a completion may leave out
        before, behind = "", text
        if not (text.lstrip().startswith('[{"name"') or _NAME.match(text)):
            return None
    calls: list[ToolCall] = []
    for part in behind.split(_CALLS):
        named = _NAME.match(part)
        try:
            values, _ = _values(part, named.end() if named else 0, ",")
        except (ValueError, RecursionError):
            calls.append(ToolCall(error="the call is not JSON"))
            continue
        wrapped = [{"name": named[1], "arguments": v} for v in values] if named else values
        calls += map(_of_json, wrapped)
    return len(before), calls


_READERS: Mapping[CallFormat, Callable[[str, IsText], Found | None]] = {
    CallFormat.TAGS: _of_tags,
    CallFormat.MISTRAL: _of_mistral,
    CallFormat.LLAMA3: _of_llama,
}


def text_parameters(schemas: Sequence[Mapping[str, Any]]) -> IsText:
    """Which parameters of these tools are texts: wherever their JSON schemas allow a text, except
    for a `null` that they allow too."""
    types: dict[tuple[Any, str], set[str]] = {}
    for schema in schemas:
        function = schema.get("function") or schema
        root = function.get("parameters") or {}
        properties = _target(root, root).get("properties") or {}
        types |= {
            (function.get("name"), name): types_of(properties[name], root) for name in properties
        }

    def is_text(tool: str, name: str, written: str) -> bool:
        allowed = types.get((tool, name), set())
        return "string" in allowed and not (written == "null" and "null" in allowed)

    return is_text


def types_of(
    schema: Any, root: Mapping[str, Any], followed: frozenset[str] = frozenset()
) -> set[str]:
    """The types that a JSON schema names for its values. Args: root: of its references; followed:
    references on the way to it, as a schema may contain itself"""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if isinstance(reference, str):
        if reference in followed:
            return set()
        return types_of(_target(schema, root), root, followed | {reference})
    schema = _target(schema, root)
    named = schema.get("type") or []
    found = {named} if isinstance(named, str) else {*named}
    values = [*(schema.get("enum") or ()), *([schema["const"]] if "const" in schema else ())]
    found |= {"string" for value in values if isinstance(value, str)}
    found |= {"null"} if None in values or schema.get("nullable") else set()
    for combined in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(combined) or ()
        found = found.union(*(types_of(part, root, followed) for part in parts))
    return found


def _target(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema itself, or the one that its `$ref` names (a JSON pointer, RFC 6901), as in
    `#/$defs/Hash`. Empty if there is none."""
    if not isinstance(schema, Mapping):
        return {}  # true and false are schemas, too
    if not isinstance(path := schema.get("$ref"), str):
        return schema
    found: Any = root
    for key in path.split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(key)] if isinstance(found, list) else found[key]
        except (LookupError, TypeError, ValueError):
            return {}
    return found if isinstance(found, Mapping) else {}
