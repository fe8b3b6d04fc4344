"""The rows of a task: records with their columns under the task's names, checked one by one.

The right answer may be where other frameworks keep it, and of several types.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import c_float
from dataclasses import dataclass, field
from datetime import date, datetime, time
from decimal import Decimal
from numbers import Number
from pathlib import Path
from typing import Any, Literal

from grpo_env.maths.final_answer import stated_answer
from grpo_env.tasks.data_files import (
    DataUnusable,
    NoSuchSplit,
    Record,
    is_file_name,
    is_saved,
    read_records,
)
from grpo_env.tasks.tool_calls import Message

Row = Mapping[str, Any]
"""One record of a data set: column name → value."""
PROMPT_COLUMNS = ("prompt", "messages", "question", "problem")
"""The first one that a row has is its prompt."""
PROBLEM_COLUMNS = ("problem", "question", "prompt")
Split = Literal["train", "test"]
ANSWER, COMPLETION, TOOLS = "answer", "completion", "tools"
ANSWER_COLUMNS = (ANSWER, "final_answer", "solution")
_RIGHT = "ground_truth"


@dataclass(frozen=True)
class TaskOptions:
    """Options of `env-server` that a task may use.

    data: a file, a directory or the id of a data set on the Hugging Face hub.
    data_config: the configuration of a data set on the hub.
    eval_data: as `data`, for evaluation.
    columns: {"prompt": "question"}: the task's name of a column → the data set's.
    system_prompt: replaces the task's own; "" for none.
    args: the user's `--task-args`.
    """

    seed: int = 0
    data: str | None = None
    data_config: str | None = None
    eval_data: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    system_prompt: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)


def is_missing(value: Any) -> bool:
    """Whether it is null, an empty text or NaN."""
    is_nan = isinstance(value, float) and math.isnan(value)
    return value is None or is_nan or (isinstance(value, str) and not value.strip())


def answer_text(value: Any) -> str:
    """The right answer as one text.

    Args: value: a text, a number, a truth value, a date, a list of one of them, or a dict with the
        key `ground_truth`; also of numpy

    Raises:
        ValueError: it is none of them, or empty.
    """
    if hasattr(value, "tolist"):  # of numpy
        return answer_text(value.tolist())
    if isinstance(value, Mapping) and _RIGHT in value:
        return answer_text(value[_RIGHT])
    if isinstance(value, list | tuple) and len(value) == 1:
        return answer_text(value[0])
    if is_missing(value):
        raise ValueError("the right answer is missing: its column is empty")
    if (text := _spelled(value)) is not None:
        return text
    if isinstance(value, Sequence):
        raise ValueError(
            f"the right answer is a list of {len(value)}; leave one, or write a reward of your own"
        )
    raise ValueError(f"the right answer is a {type(value).__name__}; expected a text or a number")


def _spelled(value: Any) -> str | None:
    """The text that a person writes: 7 for 7.0 and 7.00, 0.0000001 for 1e-07, a day without the
    time 0:00. None if it is no text, number, truth value or date."""
    if isinstance(value, datetime) and value.time() == time():
        value = value.date()  # columns of one type make times of dates
    if isinstance(value, date | time):
        return value.isoformat()
    if not isinstance(value, float | Decimal) or not math.isfinite(value):
        return str(value) if isinstance(value, str | Number) else None
    text = f"{Decimal(_shortest(value)):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


_LONGEST_WRITTEN_CHARS = 13


def _shortest(value: float | Decimal) -> str:
    """Of a float32 that became Python's float, the digits that float32 has: 0.1 for
    0.10000000149011612."""
    if isinstance(value, float) and len(text := repr(value)) > _LONGEST_WRITTEN_CHARS:
        short = (f"{value:.{digits}g}" for digits in range(6, 10))
        return next((one for one in short if c_float(float(one)).value == value), text)
    return str(value)


def problem_text(row: Row, columns: Sequence[str] = PROBLEM_COLUMNS) -> str:
    """The problem, for a task that puts it into a text of its own: a text, or messages of which one
    is the user's, and others the system's.

    Args: columns: of which the first that the row has is the problem

    Raises:
        ValueError: the row has no such column, or it holds neither.
    """
    value = row[_given(row, columns, "problem")]
    if isinstance(value, str):
        return value
    messages = value if isinstance(value, list | tuple) else ()
    match [m for m in messages if not (isinstance(m, dict) and m.get("role") == "system")]:
        case [{"role": "user", "content": str(text)}]:
            return text
    raise ValueError(
        "this task makes its own prompt, so the problem must be a text, or one message of the "
        f"user; found {type(value).__name__} {str(value)[:60]!r}"
    )


def answer_of(row: Row) -> str:
    """The right answer. Raises `ValueError`: the row has none, or it is of another type."""
    column = _given(row, ANSWER_COLUMNS, ANSWER)
    try:
        return answer_text(row[column])
    except ValueError as error:
        raise ValueError(f"column {column!r}: {error}") from error


def _given(row: Row, columns: Sequence[str], name: str) -> str:
    """The first of the columns in which the row has a value. Raises `ValueError`."""
    present = [column for column in columns if column in row]
    for column in present:
        if not is_missing(row[column]):
            return column
    if present:
        raise ValueError(f"the column {present[0]!r} is empty")
    near = [column for column in row if difflib.get_close_matches(column, columns, cutoff=0.8)]
    raise ValueError(
        f"no column for the {name}; expected one of {', '.join(columns)}, found "
        f"{', '.join(row) or 'none'}; name it with --columns {name}={(near or ['COLUMN'])[0]}"
    )


_OF_SUPERVISED_TRAINING = "messages"
TEMPLATE_MARKS = (
    *("<|im_start|>", "<|start_header_id|>", "<|begin_of_text|>", "<start_of_turn>", "<bos>"),
    *("[INST]", "<s>", "<|user|>", "<|system|>", "<|start|>", "<|turn>"),
    *("<\uff5cUser\uff5c>", "<\uff5cbegin\u2581of\u2581sentence\uff5c>"),
)
"""A prompt that begins so was rendered with the chat template of some model."""
_MAX_PROBLEMS_LISTED = 10


def rows_of(
    options: TaskOptions, split: Split, convert: Callable[[dict[str, Any]], Row] = dict
) -> list[Row] | None:
    """The rows of `--data` or `--eval-data`; None if there is no data for this split.

    Args: convert: of a row with its columns renamed; raises `ValueError` with a mistake in it

    Raises:
        DataUnusable, DatasetsMissing: see `read_records`.
    """
    if options.data is None:
        raise DataUnusable(
            "this task has no prompts of its own; set --data to a file of JSON lines such as "
            'rows.jsonl with lines like {"prompt": "3+4=", "answer": "7"}'
        )
    data, name = options.data, split
    if split == "test" and options.eval_data is not None:
        data, name = options.eval_data, "train" if _has_one_split(options.eval_data) else "test"
    elif split == "test":
        path = Path(data).expanduser()
        has_no_test = (path / "train.jsonl").is_file() and not (path / "test.jsonl").is_file()
        if has_no_test or _has_one_split(data):
            return None
    try:
        records, source = read_records(data, options.data_config, name)
        return checked_rows(records, source, options.columns, convert)
    except NoSuchSplit:
        if split == "test" and options.eval_data is None:
            return None
        raise


def _has_one_split(data: str) -> bool:
    path = Path(data).expanduser()
    return path.is_file() or is_saved(path) or is_file_name(data)


def checked_rows(
    records: Iterable[Record],
    source: str,
    columns: Mapping[str, str] | None = None,
    convert: Callable[[dict[str, Any]], Row] = dict,
) -> list[Row]:
    """Records as rows, with the columns renamed. The same rows are equal in every format.

    Args: convert: raises `ValueError` with a mistake in a row

    Raises:
        DataUnusable: there is no record, or it lists those that cannot be used.
    """
    found: list[Row] = []
    wrong: list[tuple[str, str]] = []
    for record in records:
        try:
            found.append(convert(_as_written(_renamed(_object(record.content), columns or {}))))
        except ValueError as error:
            wrong.append((record.place, str(error)))
    if wrong:
        raise DataUnusable(
            f"{source}: {len(wrong)} of {len(wrong) + len(found)} rows are invalid:\n"
            f"{each_once(wrong, columns or {})}"
        )
    if not found:
        raise DataUnusable(f"{source} contains no rows")
    return found


def each_once(wrong: Iterable[tuple[str, str]], columns: Mapping[str, str]) -> str:
    """A line for each problem, with its first row. Columns have the names that the data give them.

    Args: wrong: place and problem of each row
    """
    places: dict[str, list[str]] = {}
    for place, problem in wrong:
        for ours, theirs in columns.items():
            problem = problem.replace(f"column {ours!r}", f"column {theirs!r}")
        places.setdefault(problem, []).append(place)
    lines = (
        f"{first}{f' and {len(more)} more' if more else ''}: {problem}"
        for problem, (first, *more) in places.items()
    )
    return "\n".join(itertools.islice(lines, _MAX_PROBLEMS_LISTED))


def no_column(name: str, row: Row) -> str:
    near = difflib.get_close_matches(name, row, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"no column {name!r}; the row has {', '.join(row) or 'none'}{hint}"


def messages_of(row: Row, system_prompt: str | None) -> list[Message]:
    """The conversation that the prompt column holds: a text of the user, or messages. Raises
    `ValueError`: there is no such column, or it holds neither."""
    column, messages = conversation_of(row)
    require_no_answer(column, messages, row)
    return with_system_prompt(messages, system_prompt, column)


def conversation_of(row: Row) -> tuple[str, list[Message]]:
    """The name of the prompt column, and the conversation in it, which may end with an answer.
    Raises `ValueError`: as `messages_of`"""
    column = _given(row, PROMPT_COLUMNS, "prompt")
    return column, as_messages(column, row[column])


def with_system_prompt(
    messages: list[Message], system_prompt: str | None, column: str
) -> list[Message]:
    """The conversation with another system message; "" removes it, and None keeps it. Raises
    `ValueError`: nothing else is left."""
    if system_prompt is None:
        return messages
    rest = messages[1:] if messages[0]["role"] == "system" else messages
    if not rest:
        raise ValueError(f"the column {column!r} holds nothing but a system message")
    return [{"role": "system", "content": system_prompt}, *rest] if system_prompt else rest


def as_messages(column: str, value: Any, role: str = "user") -> list[Message]:
    """A text of `role` as a conversation, or messages. Raises `ValueError`: it is neither."""
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f"the column {column!r} is empty")
        if value.lstrip().startswith(TEMPLATE_MARKS):
            raise ValueError(
                f"the column {column!r} already has a chat template's marks, and the model's "
                "template would be added; give the text alone, or a list of messages"
            )
        if value.lstrip().startswith("[{'role'"):
            raise ValueError(
                f"the column {column!r} holds messages as Python prints them; use json.dumps"
            )
        return [{"role": role, "content": value}]
    if not isinstance(value, Sequence) or not value:
        raise ValueError(f"the column {column!r} holds neither a text nor a list of messages")
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"the column {column!r}: message {number} has no role")
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            content = ""
        if isinstance(content, list):
            raise ValueError(
                f"the column {column!r}: message {number} holds parts such as images; give one text"
            )
        if not isinstance(content, str):
            raise ValueError(f"the column {column!r}: message {number} has no text as its content")
    return [_for_templates(message) for message in value]


def _for_templates(message: dict[str, Any]) -> Message:
    """Templates expect a text, and arguments of calls as objects. OpenAI's API has null beside
    calls, and arguments as JSON. Raises `ValueError`: they are no JSON."""
    found: Any = message
    if calls := _listed(message.get("tool_calls")):
        if not all(isinstance(call, dict) for call in calls):
            raise ValueError("tool_calls of a message hold no list of objects")
        plain = [_with_object(call) for call in calls]
        found = {**message, "content": message.get("content") or "", "tool_calls": plain}
    return found  # type: ignore[no-any-return]


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    if not isinstance(arguments := function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": json.loads(arguments)}}


def require_no_answer(column: str, messages: Sequence[Message], row: Row) -> None:
    """Raises `ValueError` if the last message shows the answer, as in rows for supervised
    training."""
    last = messages[-1]
    if last["role"] != "assistant":
        return
    said = last["content"].strip()
    shows_answer = _spelled(row.get(ANSWER)) in (said, stated_answer(said) or said)
    if column == _OF_SUPERVISED_TRAINING or shows_answer:
        raise ValueError(
            f"the column {column!r} ends with an answer of the assistant, as rows for supervised "
            "training do, so the model would see it; leave the last message out, and put its text "
            "into the column answer. A beginning for the model to continue belongs into the column "
            "prompt"
        )


def _renamed(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    """The row with further columns under the task's names. The right answer is `answer`, also if it
    is where verl keeps it: `reward_model: {"ground_truth": …}`, or a column `ground_truth`.

    Raises:
        ValueError: the row lacks a column.
    """
    for name in columns.values():
        if name not in row:
            raise ValueError(no_column(name, row))
    found = {**row, **{ours: row[theirs] for ours, theirs in columns.items()}}
    holders = (found, ANSWER), (found.get("reward_model"), _RIGHT), (found, _RIGHT)
    for holder, key in holders:
        if isinstance(holder, Mapping) and not is_missing(holder.get(key)):
            return {**found, ANSWER: holder[key]}
    return found


def _as_written(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its conversations and tools as lists, also if they are a text of JSON, and
    without nulls in them: Parquet and Arrow have a null wherever another row has a key."""
    found = dict(row)
    for column in row.keys() & {*PROMPT_COLUMNS, COMPLETION, TOOLS}:
        found[column] = _without_nulls(_listed(row[column], is_talk=column != TOOLS))
    return found


def _listed(value: Any, is_talk: bool = False) -> Any:
    """The objects that a text of JSON lists; any other value as it is. Args: is_talk: whether all
    objects must be messages"""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    are_objects = all(isinstance(one, dict) for one in found)
    if is_talk and are_objects:
        are_messages = ("role" in m and ("content" in m or "tool_calls" in m) for m in found)
        return found if found and all(are_messages) else value
    return found if are_objects else value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _object(content: Any) -> dict[str, Any]:
    if isinstance(content, str):
        try:
            content = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the row is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError("the row is not an object with a name for each column")
    try:
        json.dumps(content, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(
            f"the row holds {half!a}, which is half of a character (a lone surrogate)"
        ) from None
    return content
