"""The random numbers that a run would have drawn next."""

from __future__ import annotations

import base64
import random
from typing import Self

import numpy
import torch
from pydantic import BaseModel, ConfigDict


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NumpyState(_Record):
    """numpy's global MT19937; `keys`: 624 uint32, base64."""

    keys: str
    position: int
    has_gauss: int
    cached_gauss: float


class PythonState(_Record):
    """`random.getstate()`"""

    version: int
    words: tuple[int, ...]
    cached_gauss: float | None


class RngState(_Record):
    """Of all generators that code in this process may draw from. `torch`: base64; `cuda`: the same
    of each GPU that is seen, () where none is used."""

    torch: str
    numpy: NumpyState
    python: PythonState
    cuda: tuple[str, ...] = ()

    @classmethod
    def capture(cls) -> Self:
        drawn = numpy.random.get_state(legacy=False)
        version, words, gauss = random.getstate()
        return cls(
            torch=_text(torch.get_rng_state().numpy().tobytes()),
            cuda=tuple(_text(state.numpy().tobytes()) for state in _cuda_states()),
            numpy=NumpyState(
                keys=_text(drawn["state"]["key"].astype("<u4").tobytes()),
                position=drawn["state"]["pos"],
                has_gauss=drawn["has_gauss"],
                cached_gauss=drawn["gauss"],
            ),
            python=PythonState(version=version, words=words, cached_gauss=gauss),
        )

    def restore(self) -> None:
        """Raises ValueError, TypeError or RuntimeError where these are no such states."""
        held, python = self.numpy, self.python
        keys = numpy.frombuffer(base64.b64decode(held.keys, validate=True), dtype="<u4")
        torch.set_rng_state(_tensor(self.torch))
        # On another host, or another device, what is drawn there is new in any case.
        if len(self.cuda) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all([_tensor(state) for state in self.cuda])
        numpy.random.set_state(("MT19937", keys, held.position, held.has_gauss, held.cached_gauss))
        random.setstate((python.version, python.words, python.cached_gauss))


def _cuda_states() -> list[torch.Tensor]:
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.get_rng_state_all() if in_use else []


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
