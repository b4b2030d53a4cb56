"""How the list of recipes looks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .tables import natural_width

if TYPE_CHECKING:
    from ..config import RecipeSummary


def print_recipes(summaries: Sequence[RecipeSummary]) -> None:
    """One line per recipe; in a terminal a long description is wrapped, in a pipe nothing is."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for header in ("recipe", "parameters", "data", "steps"):
        table.add_column(header, justify="right" if header in ("parameters", "steps") else "left", no_wrap=True)
    table.add_column("what it is")
    for row in summaries:
        cells = (row.name, f"{row.parameters:,}", row.data, f"{row.steps:,}", row.description)
        table.add_row(*map(Text, cells))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = natural_width(table)
    console.print(table)
