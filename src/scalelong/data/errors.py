"""What goes wrong with data, and how it is said; images that cannot be read, of which too many are an error."""

from __future__ import annotations

import difflib
import importlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)

# The part of the images that may be broken.
TOLERATED = 0.01


class DataError(ValueError):
    """The data is not there, or not as the recipe says."""


def import_extra(module: str, needed_by: str, library: str | None = None) -> Any:
    """A module of an optional library; raises ImportError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{needed_by} needs {library or module}: pip install 'scalelong[train]'") from error


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def closest_of(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the closest name and the list of all."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"{hint} There are: {', '.join(names)}"


def first_few(names: list[str], shown: int = 5) -> str:
    """
    >>> first_few(["row 1", "row 4", "row 9"], shown=2)
    'row 1, row 4 and 1 more'
    """
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


@dataclass
class BrokenImages:
    """The images of a source that could not be read, by the names of their rows, with the reasons."""

    source: str
    found: list[tuple[str, str]] = field(default_factory=list)

    def check(self, total: int) -> None:
        """Raise if more than 1 % of so many images are broken."""
        if len(self.found) > TOLERATED * total:
            raise DataError(f"data.source: {self.describe(total)}; more than 1 % stops the run")

    def report(self, total: int) -> None:
        """Log what was skipped, if anything was."""
        if self.found:
            logger.warning("skipped: %s", self.describe(total))

    def describe(self, total: int) -> str:
        few = first_few([f"{name}: {reason}" for name, reason in self.found])
        return f"{len(self.found)} of {total} images of {self.source} could not be read ({few})"
