"""The command that shows what runs and comparisons found: report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import end_well, print_now, require

if TYPE_CHECKING:
    from ..report import Content

Sources = Annotated[list[Path], typer.Argument(metavar="RUN_OR_COMPARISON…", help="Folders of runs or comparisons.")]
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="The page; else report.html.")]
Watch = Annotated[bool, typer.Option("--watch", help="Write it again after every change, until all is finished.")]
Figures = Annotated[Path | None, typer.Option(metavar="DIR", help="Also draw every figure there as PNG and SVG.")]


def report(sources: Sources, out: Out = None, watch: Watch = False, figures: Figures = None) -> None:
    """Write one HTML page about runs and comparisons.

    The page needs no network and no other file. It is made of the folders' files alone: nothing is computed again, and
    an unfinished or failed run is shown as far as it got. It is written to report.html in the folder, or in the
    current one if several are named.

    \b
    Examples:
      scalelong report runs/digits-comparison
      scalelong report runs/digits-cs runs/digits-ls --out digits.html
      scalelong report runs/digits-comparison --watch
      scalelong report runs/digits-comparison --figures figures
    """
    require("jinja2", "PIL", "pydantic", "yaml", *(["matplotlib"] if figures is not None else []))
    from ..report import read_content, write_page

    path = out or (sources[0] if len(sources) == 1 else Path()) / "report.html"
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give --out the name of a file, such as {path / 'report.html'}")
    content = follow(sources, path) if watch else read_content(sources)
    write_page(content, path)
    if figures is not None:
        from ..report.figures import draw_figures

        typer.echo(f"figures: {len(draw_figures(content, figures))} files in {figures}")
    print_now(f"page: {path}")


def follow(sources: list[Path], path: Path) -> Content:
    """Keep the page up to date until the runs end or Ctrl-C is pressed; the page of what is returned stands still."""
    from ..report import write_page
    from ..report.page import watch_content

    content = None
    end_well()
    try:
        for number, content in enumerate(watch_content(sources)):
            write_page(content, path, live=True)
            if number == 0:
                print_now(f"watching: {path} loads itself again; Ctrl-C ends it")
    except KeyboardInterrupt:
        if content is None:
            raise
    assert content is not None, "the first content is read at once"
    return content
