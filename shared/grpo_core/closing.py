"""Base classes that make objects with a `close` method usable in `with` and `async with`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class ClosesOnExit(ABC):
    """Calls `close()` at the end of a `with` block."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ClosesOnAsyncExit(ABC):
    """Awaits `close()` at the end of an `async with` block."""

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
