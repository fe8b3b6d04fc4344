"""Shows lines to the user: plain in a pipe or file, with colour and a spinner on a terminal."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from grpo_core.rollouts.record import printable

EXIT_FAILED = 1
MOST_CHARACTERS = 100
"""Of what is waited for, which may be a line of a log."""
SILENT_S = 20.0
"""After so long without a line, one tells what is waited for."""
LOOK_EVERY_S = 1.0


class Screen:
    """Writes facts to stdout, and warnings and failures to stderr. Lines are not wrapped and hold
    no markup."""

    def __init__(self, out: Console | None = None, err: Console | None = None) -> None:
        self._out = out or Console()
        self._err = err or Console(stderr=True)
        self._shown = 0  # number of lines

    @property
    def width(self) -> int:
        """Columns of the terminal; 80 in a pipe or file."""
        return self._out.width

    def line(self, text: str, style: str | None = None) -> None:
        self._shown += 1
        _write(self._out, text, style)

    def lines(self, texts: Iterable[str], style: str | None = None) -> None:
        for text in texts:
            self.line(text, style)

    def warning(self, text: str) -> None:
        """One line about a fault that did not end the command."""
        self._shown += 1
        # On a terminal, the console that draws a spinner must write above it.
        draws = self._out.is_terminal and self._err.is_terminal
        _write(self._out if draws else self._err, f"warning: {text}", "bold yellow")

    def failure(self, text: str) -> None:
        """The first line tells what happened, the others give context."""
        head, *context = text.splitlines()
        _write(self._err, head, "bold red")
        self.advice(context)

    def advice(self, texts: Iterable[str]) -> None:
        """Lines after a failure: where to look and what to do."""
        for text in texts:
            _write(self._err, text, None)

    def failed(self, error: Exception) -> int:
        """Show the error that ends a command; returns the exit status."""
        self.failure(f"failed ({type(error).__name__}): {error}")
        return EXIT_FAILED

    @contextmanager
    def activity(self, text: str, waited_for: Callable[[], str] | None = None) -> Iterator[None]:
        """Show what is being done. A terminal also shows a spinner and the seconds.
        `waited_for`: as of `waiting`; by default the text"""
        with self.waiting(waited_for or (lambda: text)):
            if not self._out.is_terminal:
                self.line(text)
                yield
                return
            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            with Progress(*columns, console=self._out, transient=True) as progress:
                progress.add_task(text, total=None)
                yield

    @contextmanager
    def waiting(self, waited_for: Callable[[], str]) -> Iterator[None]:
        """While the context is open, a line breaks each long silence. `waited_for` is called in
        another thread."""
        ended = threading.Event()
        arguments = (waited_for, ended.wait)
        thread = threading.Thread(target=self.break_silence, args=arguments, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def break_silence(self, waited_for: Callable[[], str], wait: Callable[[float], bool]) -> None:
        """After `SILENT_S` without a line, and then each time after twice as long, tell what is
        waited for, until `wait` returns True."""
        shown, silent_s, due_s = self._shown, 0.0, SILENT_S
        while not wait(LOOK_EVERY_S):
            silent_s += LOOK_EVERY_S
            if self._shown != shown:
                shown, silent_s, due_s = self._shown, 0.0, SILENT_S
            elif silent_s >= due_s:
                due_s *= 2
                text = waited_for()[:MOST_CHARACTERS]
                _write(self._out, f"  still waiting after {silent_s:g} s: {text}", "dim")

    @contextmanager
    def bar(self, text: str, done: int, total: int) -> Iterator[Callable[[], None]]:
        """Draw a bar on a terminal. The function that it gives moves the bar on by one."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(
            *(*columns, TimeElapsedColumn()),
            console=self._out,
            transient=True,
            disable=not self._out.is_terminal,
        ) as progress:
            task = progress.add_task(text, total=total, completed=done)
            yield lambda: progress.advance(task)


def _write(console: Console, text: str, style: str | None) -> None:
    shown = "\n".join(map(printable, text.split("\n")))
    console.print(shown, style=style, markup=False, highlight=False, emoji=False, soft_wrap=True)
