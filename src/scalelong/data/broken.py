"""Images that cannot be read: skipped, counted and named, and too many of them are an error."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from .errors import DataError, first_few

logger = logging.getLogger(__name__)

# The share of images that may be broken.
TOLERATED = 0.01
NAMED = 5


@dataclass
class BrokenImages:
    """The count of the images of a source that could not be read, and the names and reasons of the first few."""

    source: str
    count: int = 0
    names: list[str] = field(default_factory=list)
    _reported: int = field(default=0, repr=False)

    def add(self, name: str, reason: str) -> None:
        self.count += 1
        if len(self.names) < NAMED:
            self.names.append(f"{name}: {reason}")

    def check(self, total: int, *, allowed: int = 0) -> None:
        """Raise if more than 1 % of so many images are broken, and more than those allowed in any case."""
        if self.count > max(TOLERATED * total, allowed):
            raise DataError(f"data.source: {self.describe(total)}; more than 1 % stops the run")

    def report(self, total: int) -> None:
        """Log what was skipped, if anything was since the last time."""
        if self.count > self._reported:
            logger.warning("skipped: %s", self.describe(total))
            self._reported = self.count

    def describe(self, total: int) -> str:
        few = first_few(self.names, self.count, NAMED)
        return f"{self.count} of {total} images of {self.source} could not be read ({few})"
