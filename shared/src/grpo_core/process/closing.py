"""`with` and `async with` for objects that have a `close`.

`contextlib.closing` does this for one object at every place where it is opened; here the class says
it once, and `with` gives the object itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class ClosesOnExit(ABC):
    """Calls `close()` when a `with` block is left."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ClosesOnAsyncExit(ABC):
    """Awaits `close()` when an `async with` block is left."""

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
