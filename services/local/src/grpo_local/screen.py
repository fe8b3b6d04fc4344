"""Everything the user sees: plain lines into a pipe or file, colour and a spinner on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

EXIT_FAILED = 1


class Screen:
    """Facts go to stdout, failures to stderr. Lines are never wrapped and never read as markup."""

    def __init__(self, out: Console | None = None, err: Console | None = None) -> None:
        self._out = out or Console()
        self._err = err or Console(stderr=True)

    def line(self, text: str, style: str | None = None) -> None:
        _write(self._out, text, style)

    def lines(self, texts: Iterable[str], style: str | None = None) -> None:
        for text in texts:
            self.line(text, style)

    def failure(self, text: str) -> None:
        """The first line says what happened; the rest is context."""
        head, *context = text.splitlines()
        _write(self._err, head, "bold red")
        for line in context:
            _write(self._err, line, None)

    def failed(self, error: Exception) -> int:
        """Name the error that ends a command; returns the exit status."""
        self.failure(f"failed ({type(error).__name__}): {error}")
        return EXIT_FAILED

    @contextmanager
    def activity(self, text: str) -> Iterator[None]:
        """Say what goes on; a terminal counts the seconds until it is over."""
        if not self._out.is_terminal:
            self.line(text)
            yield
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=self._out, transient=True) as progress:
            progress.add_task(text, total=None)
            yield


def _write(console: Console, text: str, style: str | None) -> None:
    console.print(text, style=style, markup=False, highlight=False, emoji=False, soft_wrap=True)
