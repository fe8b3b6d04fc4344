"""The chat template of a recipe, in a copy of the model's tokenizer."""

from __future__ import annotations

from pathlib import Path

from grpo_offline.errors import RecipeInvalid

TOKENIZER = "tokenizer"
"""Below the run's directory."""


def template_text(value: str) -> str:
    """The template itself, or the content of a file. Raises `RecipeInvalid`."""
    if "{" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeInvalid(
            f"chat_template: {value} is no template, and cannot be read: {error.strerror}"
        ) from error


def write_tokenizer(model: str, template: str, directory: Path) -> Path:
    """A tokenizer with this template. Args: directory: of the run"""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    target = directory / TOKENIZER
    tokenizer.save_pretrained(target)
    return target


def add_template(template: str, model_directory: Path) -> None:
    """Give a trained model the template that it was trained with."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(model_directory)
