"""The command that lists the recipes: recipes."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from .console import make_table, natural_width, user_errors


def recipes() -> None:
    """List the recipes that come with scalelong.

    \b
    Example:
      scalelong recipes
    """
    table = make_table("recipe", ">parameters", "data", ">steps", "what it is")
    with user_errors():
        from ..config import load_recipe, recipe_names, summarise

        for row in map(summarise, map(load_recipe, recipe_names())):
            cells = (row.name, f"{row.parameters:,}", row.data, f"{row.steps:,}", row.description)
            table.add_row(*map(Text, cells))
    # In a terminal a long description is wrapped, in a pipe nothing is.
    table.columns[-1].no_wrap = False
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = natural_width(table)
    console.print(table)
