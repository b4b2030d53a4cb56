"""The command line. It needs typer and rich, which are imported only when it runs."""

from __future__ import annotations

import io
import os
import sys

from ..utils.process import end_process, keep_freed_memory


def main() -> None:
    """Run `scalelong`; where typer or rich is missing, say in one line how to install it."""
    prepare_process()
    try:
        from .app import app
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        print(f'error: the command line needs {package}: pip install "scalelong[train]"', file=sys.stderr)
        sys.exit(2)
    try:
        app(prog_name="scalelong")
    except SystemExit as end:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and isinstance(end.code, int | None):
            end_process(end.code or 0)
        raise


def prepare_process() -> None:
    """Settings of a process that is ours alone: its memory, its output, and how much libraries log."""
    keep_freed_memory()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that lacks a letter such as κ then shows "?" in its place, instead of a traceback.
            stream.reconfigure(errors="replace")
    # A Hub that cannot be reached would otherwise log a dozen retries before our one line that says so.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
