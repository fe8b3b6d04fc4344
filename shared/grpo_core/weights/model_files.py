"""Compares a model's files with its configuration, loads its tokenizer from its own file, and saves
it.

transformers and vLLM fill tensors that they do not find with random numbers, and go on. This
package imports no transformers, so functions take it, or its classes, as an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_core.weights.directory_checks import HEAD, UnusableWeights

TOKENIZER = "tokenizer.json"
PROBE_TEXT = (
    "The answer is 12.5 (see def f(x): return x ** 2), isn't it?\n\tÜber 1234567  naïve 你好"
)
"""Its blanks, numbers, words and scripts show the rules of a tokenizer."""
_LISTED = 3


def require_whole_model(model: str, loader: Any) -> None:
    """Reads the names and shapes of the tensors only.

    Args: loader: transformers' `AutoModelForCausalLM`

    Raises:
        UnusableWeights: tensors are missing, or config.json gives them other shapes or ties.
    """
    try:
        found, loaded = loader.from_pretrained(
            model, device_map="meta", ignore_mismatched_sizes=True, output_loading_info=True
        )
    except AssertionError as error:  # of torch's embedding
        raise UnusableWeights(
            f"--model {model}: {error}: pad_token_id of config.json must be below its vocab_size"
        ) from error
    except OSError as error:
        raise UnusableWeights(f"--model {model}: {error}; copy the model again") from error
    missing, shapes = sorted(loaded["missing_keys"]), sorted(loaded["mismatched_keys"])
    if shapes:
        listed = _listed([f"{name} {[*own]} instead of {[*asked]}" for name, own, asked in shapes])
        raise UnusableWeights(
            f"--model {model}: its files hold tensors of other shapes than config.json asks for: "
            f"{listed}; restore the config.json that belongs to these files (vocab_size is the "
            "number of rows of the embedding)"
        )
    if missing:
        raise UnusableWeights(
            f"--model {model}: its files lack tensors that config.json asks for: "
            f"{_listed(missing)}; " + _why(missing, sorted(loaded["unexpected_keys"]))
        )
    if _unties(found) and _unties(loader.from_pretrained(model)):  # equal tensors are tied
        raise UnusableWeights(
            f"--model {model}: config.json ties {HEAD} to the embedding (tie_word_embeddings), but "
            "the files hold a head with other values; set tie_word_embeddings to false"
        )


def load_tokenizer(name: str, transformers: Any, **options: Any) -> Any:
    """The tokenizer that tokenizer.json describes.

    `AutoTokenizer` may choose a class, by tokenizer_config.json or by the type of the model, that
    takes only the vocabulary from the file. With rules of its own for blanks and numbers, prompts
    and answers become others.

    Args: options: of `from_pretrained`

    Raises:
        UnusableWeights: transformers changes the tokenizer of the file, as the other files tell it.
    """
    file = transformers.utils.cached_file(
        name, TOKENIZER, _raise_exceptions_for_missing_entries=False
    )
    if file is None:
        return transformers.AutoTokenizer.from_pretrained(name, **options)
    loaded = transformers.PreTrainedTokenizerFast.from_pretrained(name, **options)
    of_file = type(loaded.backend_tokenizer).from_file(file)
    of_file.no_padding()  # of the batches that it was saved after, as the truncation is
    of_file.no_truncation()
    expected = of_file.encode(PROBE_TEXT, add_special_tokens=False).ids
    found = token_ids(loaded, PROBE_TEXT)
    if found != expected:
        raise UnusableWeights(
            f"the tokenizer of {name}: {TOKENIZER} encodes {PROBE_TEXT!r} as {expected}, but "
            f"transformers makes {found} of it; restore the tokenizer_config.json that belongs to "
            f"this {TOKENIZER}"
        )
    return loaded


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """Of a text that holds its special tokens already. Args: tokenizer: of transformers"""
    found: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return found


def save_pretrained(model: Any, directory: Path, **options: Any) -> None:
    """The method of this name. safetensors lets only the owner read its files: they get the mode of
    the others."""
    model.save_pretrained(str(directory), **options)
    mode = next(directory.glob("*config.json")).stat().st_mode
    for file in directory.glob("*.safetensors"):
        file.chmod(mode)


def _unties(model: Any) -> bool:
    """Whether the head has weights of its own against the configuration."""
    is_tied: bool = model.config.get_text_config().tie_word_embeddings
    return is_tied and (
        model.get_output_embeddings().weight is not model.get_input_embeddings().weight
    )


def _why(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    if unexpected:
        return (
            f"the files name tensors that the model does not have: {_listed(unexpected)}; save the "
            "model itself, without what wraps it (torch.compile, an adapter, a trainer)"
        )
    if missing == [f"{HEAD}.weight"]:
        return "set tie_word_embeddings to true if the embedding is the head, or save the head too"
    return "download or copy the files again, with the config.json that belongs to these files"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
