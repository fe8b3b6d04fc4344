"""Converts conversations to token ids with the served model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from grpo_core.errors import GrpoError
from grpo_core.weights.directory_checks import UnusableWeights
from grpo_core.weights.model_files import load_tokenizer, token_ids
from grpo_env.maths.final_answer import THINK_TAG
from grpo_env.tasks import Message, MessagesUnusable
from grpo_env.tasks.tool_calls import THOUGHTS, CallFormat, format_of
from grpo_env.tasks.tools import hidden_torch

_KEPT_PROMPTS = 256
_PLACEHOLDER = "\x02answer\x03"
"""Stands for an answer of the model. No conversation contains these control characters."""
_TOOL_ANSWER = "answer of the tool"
_SHOWN = 40
"""Characters of a text in an error message."""
_QUESTION: Message = {"role": "user", "content": "?"}


def divided(prompt: Sequence[Message]) -> tuple[Sequence[Message], str]:
    """The messages that the policy answers, and the beginning of its answer: the text of a last
    message of the assistant."""
    last = prompt[-1]
    if last["role"] != "assistant" or len(prompt) == 1:
        return prompt, ""
    return prompt[:-1], last["content"]


def answered(messages: Sequence[Message], text: str) -> list[Message]:
    """The conversation with the policy's answer. A last message of the assistant is its
    beginning."""
    asked, begun = divided(messages)
    return [*asked, {"role": "assistant", "content": begun + text}]


class TokenizerUnusable(GrpoError):
    """The tokenizer cannot be loaded, or cannot render tools or answers."""


class ChatTemplate:
    """Converts what the policy continues to token ids, with the chat template of a tokenizer.

    Args: arguments: of the template
    """

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self._arguments = arguments or {}
        self._prompts: dict[str, list[int]] = {}
        self._shown_tools: set[str] = set()

    def prompt_ids(
        self, prompt: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """[T] of a conversation that the policy continues, or of a text without template."""
        # All conversations of a group begin alike, and small data sets repeat their prompts.
        key = repr((prompt, tools))
        if key not in self._prompts:
            if len(self._prompts) >= _KEPT_PROMPTS:
                del self._prompts[next(iter(self._prompts))]  # the oldest one
            self._prompts[key] = (
                self.tokenizer.encode(prompt)
                if isinstance(prompt, str)
                else token_ids(self.tokenizer, self._rendered(prompt, tools))
            )
        return [*self._prompts[key]]

    def answer_ids(
        self,
        prompt: Sequence[Message],
        answer: Message,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """[T] of an answer behind `prompt_ids`, with the template's end of a turn: what the policy
        learns to say.

        Raises:
            TokenizerUnusable: the template renders an answered prompt in another way.
        """
        asked, begun = divided(prompt)
        before = self._rendered(prompt, tools)
        said: Message = {**answer, "content": begun + answer["content"]}
        whole = self._render([*asked, said], tools, is_asked=False)
        if not whole.startswith(before):
            pairs = enumerate(zip(before, whole, strict=False))
            same = next((at for at, (old, new) in pairs if old != new), len(whole))
            raise TokenizerUnusable(
                f"the chat template ends the prompt with {before[same:]!r}, and shows "
                f"{whole[same : same + _SHOWN]!r} there once it is answered, so the policy would "
                "learn after another beginning than it gets; begin the answers so, or put a "
                "template of your own as chat_template.jinja into the model's directory"
            )
        return token_ids(self.tokenizer, whole[len(before) :])

    def _rendered(self, prompt: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        """The prompt with the beginning of the policy's answer."""
        asked, begun = divided(prompt)
        rendered = self._render(asked, tools)
        if begun.lstrip().startswith(THINK_TAG) and rendered.rstrip().endswith(THINK_TAG):
            rendered = rendered[: rendered.rindex(THINK_TAG)]  # both write it
        return rendered + begun

    def opening(self, prompt: str | Sequence[Message]) -> str:
        """The beginning of the policy's answer that the prompt already holds: see `Answer`."""
        if isinstance(prompt, str):
            return ""
        begun = divided(prompt)[1]
        return begun if begun.lstrip().startswith(THINK_TAG) else self._thinking + begun

    @cached_property
    def call_format(self) -> CallFormat | None:
        """How the template asks for calls of tools; None: in a form that is not read here."""
        return format_of(str(self.tokenizer.chat_template))

    def require_tools(self, task: str, tool: Mapping[str, Any]) -> None:
        """Check that the model sees the tools and their answers. Raises `TokenizerUnusable`: the
        template leaves one of them out, or cannot render it."""
        name = (tool.get("function") or tool).get("name", "")
        if name in self._shown_tools:
            return
        answer: Message = {"role": "tool", "name": name, "content": _TOOL_ANSWER}
        said: Message = {"role": "assistant", "content": "!"}
        remedy = (
            "use another model, or put a template of your own as chat_template.jinja into the "
            "directory of --tokenizer"
        )
        try:
            answers = self._render([_QUESTION, said, answer], ())
            with_tool, without = (self._render([_QUESTION], tools) for tools in ([tool], ()))
            shows = {
                "its tools": with_tool.count(name) > without.count(name),
                "the answers of its tools": _TOOL_ANSWER in answers,
            }
        except MessagesUnusable as error:
            raise TokenizerUnusable(f"{error} (task {task}); {remedy}") from error
        if hidden := [what for what, is_shown in shows.items() if not is_shown]:
            raise TokenizerUnusable(
                f"the chat template of the model does not show {' and '.join(hidden)} (task "
                f"{task}), so the model cannot know them; {remedy}"
            )
        if self.call_format is None:
            raise TokenizerUnusable(
                f"the chat template of the model asks for calls of tools (task {task}) in a form "
                f"that is not read here; {remedy}"
            )
        self._shown_tools.add(name)

    def shows_thought(self, prompt: Sequence[Message], answer: Message) -> bool:
        """Whether the template shows the thought that the answer has in a field of its own."""
        without: Any = {key: value for key, value in answer.items() if key not in THOUGHTS}
        return self._render([*prompt, answer], (), is_asked=False) != self._render(
            [*prompt, without], (), is_asked=False
        )

    @cached_property
    def _thought_field(self) -> str | None:
        """The field that the template reads as the thought of an answer, or of a call as Gemma 4;
        None if there is none."""
        call = {"type": "function", "function": {"name": "f", "arguments": {}}}
        for rest in {"content": "!"}, {"content": "", "tool_calls": [call]}:
            for name in THOUGHTS:
                said: Any = {"role": "assistant", name: _PLACEHOLDER, **rest}
                with suppress(MessagesUnusable):
                    if _PLACEHOLDER in self._applied([_QUESTION, said], (), is_asked=False):
                        return name
        return None

    @cached_property
    def _thinking(self) -> str:
        """What the template itself writes of an answer, from `<think>` on."""
        _, _, behind = self._render([_QUESTION], ()).rpartition(_QUESTION["content"])
        _, tag, thought = behind.partition(THINK_TAG)
        return tag + thought

    def turn_ids(self, messages: Sequence[Message], last_id: int) -> list[int]:
        """[T] of what follows an answer of the policy: the rest of the template's end of a turn,
        the messages, and the beginning of the next answer.

        Args: last_id: the answer's last token. If the template's end of a turn begins with it, it
            is not repeated.
        """
        # Only the text behind the answer counts. So nothing that the policy said is tokenised
        # again, and templates may show earlier turns in another way.
        before: list[Message] = [_QUESTION, {"role": "assistant", "content": _PLACEHOLDER}]
        rendered = self._render([*before, *messages], ())
        _, found, behind = rendered.partition(_PLACEHOLDER)  # the messages may hold it too
        if not found:
            raise TokenizerUnusable(
                "the chat template leaves answers of the model out, so a conversation cannot be "
                "continued; use a tokenizer whose template shows them"
            )
        ids = token_ids(self.tokenizer, behind)
        return ids[1:] if ids[:1] == [last_id] else ids

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token by itself."""
        return [self.tokenizer.decode([token_id]) for token_id in ids]

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        is_asked: bool = True,
    ) -> str:
        """The text of a conversation. Args: is_asked: whether the beginning of an answer follows"""
        return self._applied([self._with_thought(one) for one in messages], tools, is_asked)

    def _with_thought(self, message: Message) -> Message:
        """The message with its thought under the name that the template reads."""
        fields: Any = message
        thoughts = [fields[name] for name in THOUGHTS if fields.get(name)]
        if not thoughts or self._thought_field is None:
            return message
        renamed: Any = {key: value for key, value in fields.items() if key not in THOUGHTS}
        renamed[self._thought_field] = thoughts[0]
        return renamed  # type: ignore[no-any-return]

    def _applied(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], is_asked: bool
    ) -> str:
        from jinja2 import TemplateError

        # Mistral's templates require an id, of this length.
        shown = [{"tool_call_id": "000000000", **m} if m["role"] == "tool" else m for m in messages]
        try:
            text: str = self.tokenizer.apply_chat_template(
                shown,
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=is_asked,
                **self._arguments,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise MessagesUnusable(
                f"the chat template cannot render a conversation of the roles {roles}: {error}; "
                "use other messages, or a tokenizer whose template supports them"
            ) from error
        return text


def load_template(tokenizer_name: str, arguments: Mapping[str, Any] | None = None) -> ChatTemplate:
    """The chat template of the model's tokenizer.

    Args: arguments: of the template, for example `{"enable_thinking": False}`

    Raises:
        TokenizerUnusable: the tokenizer is missing, differs from its file or has no chat template.
    """
    try:
        with hidden_torch():
            import transformers

            tokenizer = load_tokenizer(tokenizer_name, transformers)
    except UnusableWeights as error:
        raise TokenizerUnusable(str(error)) from error
    except Exception as error:  # tokenizers raises nothing more specific
        raise TokenizerUnusable(
            f"no tokenizer at {tokenizer_name!r} ({error}); name one with --model or --tokenizer"
        ) from error
    if not tokenizer.chat_template:
        raise TokenizerUnusable(
            f"the tokenizer of {tokenizer_name!r} has no chat template; use the tokenizer of an "
            "instruction-tuned model, or add chat_template.jinja to its directory"
        )
    return ChatTemplate(tokenizer, arguments)
