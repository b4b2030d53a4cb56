"""Images of a trained run, each from a seed of its own."""

from .draw import Wish, sample_run

__all__ = [
    "Wish",
    "sample_run",
]
