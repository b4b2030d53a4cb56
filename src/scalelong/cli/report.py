"""The command that shows what runs and comparisons found: report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import print_now, user_errors

if TYPE_CHECKING:
    from ..report import Content

Sources = Annotated[list[Path], typer.Argument(metavar="RUN_OR_COMPARISON…", help="Folders of runs or comparisons.")]
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="The page; else report.html.")]
Watch = Annotated[
    bool, typer.Option("--watch", help="Write it again whenever a folder changes, until all is finished.")
]
Figures = Annotated[Path | None, typer.Option(metavar="DIR", help="Also draw every figure there as PNG and SVG.")]


def report(sources: Sources, out: Out = None, watch: Watch = False, figures: Figures = None) -> None:
    """Write one HTML page about runs and comparisons.

    The page needs no network and no other file. It is made of the folders' files alone: nothing is computed again, and
    an unfinished or diverged run is shown as far as it got. It is written to report.html in the folder, or in the
    current one if several are named.

    \b
    Examples:
      scalelong report runs/digits-comparison
      scalelong report runs/digits-cs runs/digits-ls --out digits.html
      scalelong report runs/digits-comparison --watch
      scalelong report runs/digits-comparison --figures figures
    """
    with user_errors("report"):
        import jinja2  # noqa: F401
        import PIL  # noqa: F401
        import pydantic  # noqa: F401
        import yaml  # noqa: F401

        if figures is not None:
            import matplotlib  # noqa: F401
    with user_errors():
        path = out or (sources[0] if len(sources) == 1 else Path()) / "report.html"
        if path.is_dir():
            raise ValueError(f"{path} is a folder: give --out the name of a file, such as {path / 'report.html'}")
        content = follow(sources, path) if watch else write_once(sources, path)
        if figures is not None:
            draw(content, figures)
    typer.echo(f"page: {path}")


def write_once(sources: list[Path], path: Path) -> Content:
    from ..report import read_content, write_page

    content = read_content(sources)
    write_page(content, path)
    return content


def follow(sources: list[Path], path: Path) -> Content:
    """Keep the page up to date; ends with the runs, or at Ctrl-C with a page that stands still."""
    from ..report import write_page
    from ..report.page import watch_content

    content, announced = None, False
    try:
        for content in watch_content(sources):
            write_page(content, path, live=True)
            if not announced:
                print_now(f"watching: {path} loads itself again; Ctrl-C ends it")
            announced = True
    except KeyboardInterrupt:
        if content is None:
            raise
    assert content is not None, "the first content is read at once"
    write_page(content, path)
    return content


def draw(content: Content, folder: Path) -> None:
    from ..report.figures import draw_figures

    written = draw_figures(content, folder)
    typer.echo(f"figures: {len(written)} files in {folder}")
