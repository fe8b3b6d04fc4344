"""What the commands of a recorded run share: they print lines, and tell errors."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from grpo_core.errors import GrpoError
from grpo_core.settings import EXIT_USAGE, OptionsInvalid

EXIT_DIFFERS = 1


@contextlib.contextmanager
def errors_told(prog: str) -> Iterator[None]:
    try:
        yield
    except OptionsInvalid as error:
        sys.stderr.write("".join(f"{prog}: {line}\n" for line in error.lines))
        raise SystemExit(EXIT_USAGE) from None
    except GrpoError as error:
        sys.stderr.write(f"{prog}: {type(error).__name__}: {error}\n")
        raise SystemExit(EXIT_DIFFERS) from None


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
