"""The command that makes one run of a comparison: job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import AllowCode, fail, print_now

Place = Annotated[Path, typer.Argument(metavar="FOLDER", help="A run's folder in a comparison, or its kappa.json.")]


def job(place: Place, allow_code: AllowCode = False) -> None:
    """Make one run of a comparison, or resume it; scalelong compare and edge print these commands with --jobs.

    May run anywhere where the folder is, in any order, again and again: a run that is done is left as it is.

    Exit code 0: it is done, and a training that failed is a result. 1: it broke off with an error. 2: it was refused,
    and one line says why. 143: it was told to stop and has saved, the same command resumes it.

    \b
    Example:
      scalelong job runs/digits-comparison/runs/cs/seed-1
    """
    from ..compare import jobs, outcome

    found = jobs.find_job(place, allow_code=allow_code)
    if not jobs.is_done(found):
        try:
            found.work(found.path, found.config)
        except SystemExit:
            print_now(f"{place}: stopped and saved; the same command resumes it")
            raise
        except (OSError, RuntimeError, MemoryError) as error:
            fail(f"{place} broke off: {error or type(error).__name__}", code=1)
    ended = outcome.read_outcome(place)
    print_now(
        f"{place}: {'done' if ended is None else ended.status}{f', {ended.message}' if ended and ended.message else ''}"
    )
