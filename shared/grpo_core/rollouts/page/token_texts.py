"""The text of each token of a sequence, also if a character is split over several tokens."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_core.errors import BrokenRollouts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"
"""Stands for a space in SentencePiece vocabularies."""
_CONTINUATION = range(0x80, 0xC0)
"""Bytes of UTF-8 that go on with a character."""


class TokenTexts:
    """Called with token ids, returns the text of each; joined, they are the sequence's text.

    If a character is split over several tokens, the last of them has the character and the others
    have an empty text. Bytes that are no UTF-8 become U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(id for id, token in added.items() if token.special)
        """Ids of the special tokens, for example the end of a message."""
        self._bytes = {id: token.content.encode() for id, token in added.items()}
        self._decodes_bytes = self._decoded("Ċ") == "\n"  # byte-level BPE
        self._decodes_hex = self._decoded("<0x0A>") == "\n"  # SentencePiece with byte fallback

    @classmethod
    def from_file(cls, path: Path) -> TokenTexts:
        """Needs the package tokenizers.

        Raises:
            BrokenRollouts: the file is missing, or is no tokenizer in the format of tokenizers.
        """
        from tokenizers import Tokenizer

        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # noqa: BLE001 - the library raises nothing more specific
            raise BrokenRollouts(
                f"{path} cannot be read as a tokenizer: {error}; copy tokenizer.json of the "
                "model to this path"
            ) from None

    def __call__(self, tokens: Sequence[int]) -> list[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        texts: list[str] = []
        for token in tokens:
            data = self._bytes.get(token)
            if data is None:
                data = self._bytes[token] = self._bytes_of(token)
            if texts and data and data[0] not in _CONTINUATION:
                texts[-1] += decoder.decode(b"", final=True)  # a character that stays incomplete
            texts.append(decoder.decode(data))
        if texts:
            texts[-1] += decoder.decode(b"", final=True)
        return texts

    def _decoded(self, token: str) -> str | None:
        decoder = self._tokenizer.decoder
        return None if decoder is None else decoder.decode([token])

    def _bytes_of(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return f"[{token}]".encode()  # not in the vocabulary
        if self._decodes_bytes:
            return bytes(_byte_of()[character] for character in text)
        if self._decodes_hex and (found := _BYTE_TOKEN.fullmatch(text)):
            return bytes.fromhex(found[1])
        return text.replace(_WORD_START, " ").encode()


@cache
def _byte_of() -> dict[str, int]:
    """The byte for each character of a byte-level vocabulary.

    Source: `bytes_to_unicode` of GPT-2's encoder. Printable characters stand for themselves, the
    other bytes for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + at): byte for at, byte in enumerate(others)
    }
