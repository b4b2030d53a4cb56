"""The command that asks why a run collapsed: why."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from .console import NOTHING, AllowCode, make_table, print_line, print_now, print_table, shown_progress

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that collapsed.")]
Start = Annotated[int | None, typer.Option("--from", metavar="STEP", help="The checkpoint; else the last good one.")]


def why(
    run: Run,
    replays: Annotated[int, typer.Option(min=1, help="Replays of each change; twice as many if chance decides.")] = 4,
    after: Annotated[
        int | None, typer.Option("--steps", min=20, help="Steps past the collapse; else as many as before it, or 200.")
    ] = None,
    start: Start = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; one for each core, or GPU.")] = None,
    allow_code: AllowCode = False,
) -> None:
    """Replay the collapse of a run with one change at a time, and say what saves it.

    From the last good checkpoint on, the same batches are trained on again, without the seat belt: with nothing
    changed, at lower rates, with other settings of Adam, clipped, in float32, in another order, without the batches
    that stood out, with one module put back, and with scaled skips. A cause is named if only changes of its kind save
    the run in clearly more replays than none. Replays lie in RUN/why, the answer in RUN/why.json and on the run's page.

    Ctrl-C or SIGTERM: replays are saved, the same command goes on with them, and the exit code is 130 or 143.
    Exit code 1: a replay broke off with an error.

    \b
    Examples:
      scalelong why runs/mine
      scalelong why runs/mine --from 4000 --steps 500
      scalelong why runs/mine --replays 8 --workers 2
    """
    from ..compare.why import ask_why

    with shown_progress() as show:
        options: Any = {"replays": replays, "after": after, "start": start, "workers": workers}
        result = ask_why(run, **options, show=show, say=print_now, allow_code=allow_code)
    if result.signal is not None:
        print_line(f"stopped and saved. To go on: {shlex.join(['scalelong', *sys.argv[1:]])}")
        sys.exit(128 + result.signal)
    print_answer(result.content)
    print_line(f"results: {result.file}")
    if result.content["failures"]:
        sys.exit(1)


def print_answer(content: Mapping[str, Any]) -> None:
    """A table of the changes, a sentence, and what to do."""
    place = f"from step {content['checkpoint']}, collapse after step {content['collapse']}, to step {content['end']}"
    print_line(f"replays {place}", style="bold")
    table = make_table("changed", "kind", ">survived", ">loss")
    for row in content["changes"]:
        loss = NOTHING if row["loss"] is None else f"{row['loss']:.4f}"
        table.add_row(*map(Text, (row["label"], row["group"], f"{row['saved']} of {row['of']}", loss)))
    print_table(table)
    for change, reason in content["left_out"].items():
        print_line(f"not tried: {change} ({reason})")
    for replay, message in content["failures"].items():
        print_line(f"broken: {replay}: {message}", style="yellow")
    print_line(content["sentence"], style="bold")
    print_line(f"Next: {content['command']}")
