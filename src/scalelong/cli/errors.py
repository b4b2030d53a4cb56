"""How a command ends when it cannot do what was asked: one line on stderr, and exit code 2."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

# What fails in every process fails in the first, which speaks at once; the launcher then ends the others.
FIRST_SPEAKS_SECONDS = 1.0


def fail(message: str) -> NoReturn:
    line = " ".join(message.split())
    if not is_first_process():
        time.sleep(FIRST_SPEAKS_SECONDS)
        line = f"process {os.environ['RANK']}: {line}"
    typer.echo(f"error: {line}", err=True)
    sys.exit(2)


def is_first_process() -> bool:
    """Whether this process speaks for all that a launcher may have started."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def user_errors() -> Iterator[None]:
    """For the part of a command that may fail because of what the user gave: one line instead of a traceback."""
    try:
        yield
    except (ValueError, ImportError, OSError) as error:
        fail(str(error))


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """For imports of packages that come with an extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "scalelong":
            raise
        fail(f'this command needs {package}: pip install "scalelong[{extra}]"')
