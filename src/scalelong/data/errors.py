"""What goes wrong with data, and how it is said."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DataError(ValueError):
    """The data is not there, or not as the recipe says."""


def missing_extra(source: str, library: str) -> ImportError:
    return ImportError(f"the data {source!r} needs {library}: pip install 'scalelong[train]'")


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def closest_of(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the closest name and the list of all."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"{hint} There are: {', '.join(names)}"


def first_few(names: Iterable[str], count: int, shown: int = 5) -> str:
    """
    >>> first_few(["row 1", "row 4", "row 9"], 3, shown=2)
    'row 1, row 4 and 1 more'
    """
    some = [name for name, _ in zip(names, range(shown), strict=False)]
    return ", ".join(some) + (f" and {count - len(some)} more" if count > len(some) else "")
