"""`with` and `async with` for objects that have a `close`."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class ClosesOnExit:
    """Calls `close()` when a `with` block is left."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class ClosesOnAsyncExit:
    """Awaits `close()` when an `async with` block is left."""

    async def close(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
