"""From rows to pixels in several threads, in the order of the rows whatever the number of threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, TypeVar

from torch import Tensor

from .config import DataConfig
from .errors import DataError, first_line
from .pixels import open_picture, to_pixels

Item = TypeVar("Item")
Result = TypeVar("Result")

# Rows per task: a task for each small picture would cost as much as the picture.
CHUNK = 16


def decode(name: str, raw: Any, config: DataConfig) -> Tensor | str:
    """The pixels of a row's picture, or why it could not be read. Shape: (C, H, W), uint8."""
    try:
        with open_picture(raw) as picture:
            return to_pixels(picture, config)
    except DataError as error:
        raise DataError(f"{error} ({name})") from error
    except MemoryError:
        raise
    except Exception as error:  # Damaged files make PIL raise a dozen kinds of errors.
        return f"{type(error).__name__}: {first_line(error)}"


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Generator[Result, None, None]:
    """As `map`, computed ahead by so many threads.

    >>> list(ordered_map(abs, [-3, 1, -2], workers=2))
    [3, 1, 2]
    """
    source = iter(items)
    waiting: deque[Future[list[Result]]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="decode")
    try:
        while True:
            while len(waiting) < 2 * workers and (chunk := list(islice(source, CHUNK))):
                waiting.append(pool.submit(lambda part: [function(item) for item in part], chunk))
            if not waiting:
                return
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def row_name(number: str, picture: Any) -> str:
    """How messages call a row: by its number, and by its file if that is known.

    >>> row_name("row 7", {"bytes": None, "path": "cat.png"})
    'row 7 (cat.png)'
    """
    path = picture.get("path") if isinstance(picture, dict) else getattr(picture, "name", None)
    return f"{number} ({path})" if path else number
