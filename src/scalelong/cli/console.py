"""What all commands share: their options, how they fail and show progress, and what they print."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, cast

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from .. import __version__
from ..diffusion import SAMPLERS
from ..diffusion.samplers import Spacing, Variance
from . import SHOW_CURSOR, STOPPED, printable, stop_at_once

if TYPE_CHECKING:
    from ..config import Config
    from ..training import Display

# Image k has the seed `seed + k`, and generators take those below 2^64.
LARGEST_SEED = 2**63
# What fails in every process fails in the first, which speaks at once; the launcher then ends the others.
FIRST_SPEAKS_SECONDS = 1.0
SECONDS_BETWEEN_LINES = 10.0
NOTHING = "–"
# A message quotes what was wrong, however long that is.
LONGEST_LINE = 4000
# How torch says it, on processors and on GPUs.
OUT_OF_MEMORY = re.compile("out of memory|can't allocate memory|size calculation overflowed|Invalid buffer size")
LESS_MEMORY = "set a smaller batch (training.batch_size), network or image size"

Recipe = Annotated[str, typer.Argument(metavar="RECIPE", help="A name, or the path of a .yaml file.")]
Jobs = Annotated[bool, typer.Option("--jobs", help="Print a command for each run that is left; train nothing.")]
Collect = Annotated[bool, typer.Option("--collect", help="Take up what there is of the runs; train nothing.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a recipe's value.")]
Force = Annotated[bool, typer.Option("--force", help="Also train what seems too large for this machine's memory.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]
Weights = Annotated[Literal["ema", "raw"], typer.Option(help="The EMA weights, or those of the last step.")]
Which = Annotated[str, typer.Option("--checkpoint", metavar="last|best|STEP", help="best = lowest validation loss.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Steps of the solver; else the recipe's.")]
Sampler = Annotated[str | None, typer.Option(help=f"One of {', '.join(SAMPLERS)}; else the recipe's.")]
TimestepSpacing = Annotated[Spacing | None, typer.Option(help="Which times it visits; else the recipe's.")]
NoiseVariance = Annotated[Variance | None, typer.Option(help="Of what ddpm draws; else the recipe's.")]
Clip = Annotated[bool | None, typer.Option(help="Keep estimates of the image within its range; else the recipe's.")]
Guidance = Annotated[float | None, typer.Option(min=0, help="1 = the condition as it is; else the recipe's.")]
Seed = Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="The first image's seed; the next has the next.")]
AllowCode = Annotated[bool, typer.Option("--allow-code", help="Let a run bring the code of its own network.")]
Compile = Annotated[bool, typer.Option("--compile", help="Compile first, once per size of batch; faster then.")]

# The base of all errors in how a command was called, of which typer exports this subclass only.
UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])

Show = Callable[[str, float, int], None]
"""Called with what is counted, how many of them are done, and of how many."""


def is_first_process() -> bool:
    """Whether this process speaks for all that a launcher may have started."""
    return os.environ.get("RANK", "0") == "0"


def fail(message: str, code: int = 2) -> NoReturn:
    """End the command with one line on stderr."""
    line = " ".join(printable(message).split())
    line = line if len(line) < LONGEST_LINE else f"{line[:LONGEST_LINE]} …"
    if not is_first_process():
        time.sleep(FIRST_SPEAKS_SECONDS)
        line = f"process {os.environ['RANK']}: {line}"
    typer.echo(f"error: {line}", err=True)
    sys.exit(code)


def stop() -> NoReturn:
    """End the command after Ctrl-C with one line."""
    if is_first_process():
        typer.echo(STOPPED.decode(), nl=False, err=True)
    sys.exit(128 + signal.SIGINT)


def report_defect(error: Exception) -> NoReturn:
    """End the command with one line that says where the traceback is: what comes here is no mistake of the user's."""
    handle, file = tempfile.mkstemp(prefix="scalelong-defect-", suffix=".txt")
    with open(handle, "w", encoding="utf-8", errors="replace") as log:
        log.write(f"scalelong {__version__}, {shlex.join(sys.argv)}\n\n{''.join(traceback.format_exception(error))}")
    what = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    fail(f"{what}. This is a defect of scalelong: please report it with {file}, where the traceback is", code=1)


@contextmanager
def user_errors(extra: str = "train") -> Iterator[None]:
    """For what may fail without a mistake in the program; `extra` is what brings the packages that it imports."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "scalelong":
            raise
        fail(f'this command needs {package}: pip install "scalelong[{extra}]"')
    except (ValueError, ImportError, OSError) as error:
        fail(str(error))
    except MemoryError as error:
        fail(f"there is not enough memory{f': {error}' if str(error) else ''}; {LESS_MEMORY}")
    except RuntimeError as error:
        from ..guard.losses import TrainingDiverged
        from ..runs import CheckpointError

        if OUT_OF_MEMORY.search(str(error)):
            fail(f"there is not enough memory ({str(error).partition(chr(10))[0]}); {LESS_MEMORY}")
        if not isinstance(error, CheckpointError | TrainingDiverged):
            raise
        fail(str(error))


class OneLineErrors(TyperGroup):
    """Reports what the user can put right in one line on stderr, with exit code 2."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        try:
            with user_errors():
                code = super().main(*args, standalone_mode=False, **extra)
        except UsageError as error:
            fail(error.format_message())
        except Exception as error:
            report_defect(error)
        sys.exit(code)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; what typer makes of Ctrl-C differs between its versions, so it is not left to it."""
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, typer.Abort):
            stop()


def greet(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        typer.echo(f"scalelong {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def require(*packages: str) -> None:
    """Ask for packages of the extra `report` before any work is done."""
    with user_errors("report"):
        for package in packages:
            import_module(package)


def given(**options: Any) -> dict[str, Any]:
    """The options that the user set."""
    return {name: value for name, value in options.items() if value is not None}


def check_sizes(configs: Iterable[Config], *, force: bool) -> None:
    """Raise, before anything is built, where a recipe's network is too large for this machine, unless it is forced."""
    from ..config.build import check_memory

    for config in () if force else configs:
        check_memory(config)


def set_options(settings: Iterable[str]) -> list[str]:
    """
    >>> set_options(["optim.lr=1e-3", "seed=1"])
    ['--set', 'optim.lr=1e-3', '--set', 'seed=1']
    """
    return [word for setting in settings for word in ("--set", setting)]


@contextmanager
def shown_progress() -> Iterator[Show]:
    """A function to call with what is done, for jobs that resume; Ctrl-C ends them in one line.

    The first process shows a bar in a terminal, plain lines otherwise, on stderr, so that stdout is the result.
    """
    console = Console(stderr=True)
    end_well()
    try:
        if not is_first_process():
            yield lambda what, done, count: None
        elif console.is_terminal:
            numbers = TextColumn("{task.completed:.0f}/{task.total:.0f} {task.description}")
            with Progress(numbers, BarColumn(), TimeRemainingColumn(compact=True), console=console) as progress:
                yield bars(progress)
        else:
            yield progress_lines()
    except KeyboardInterrupt:
        stop()


def end_well() -> None:
    """From now on Ctrl-C is a KeyboardInterrupt, for work that has something to put in order when it ends."""
    if signal.getsignal(signal.SIGINT) is stop_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def bars(progress: Progress) -> Show:
    """A bar for each thing that is counted."""
    tasks = {}

    def show(what: str, done: float, count: int) -> None:
        if what not in tasks:
            tasks[what] = progress.add_task(what, total=count)
        progress.update(tasks[what], completed=done, total=count)

    return show


def progress_lines() -> Show:
    """A line from time to time."""
    last = time.monotonic()

    def show(what: str, done: float, count: int) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            print(f"{int(done)} of {count} {what}", file=sys.stderr, flush=True)

    return show


def choose_display(title: str) -> Display:
    """How a run is shown: a bar in a terminal, plain lines in a pipe or a file, where progress goes to stderr."""
    from ..training import Lines

    return Bar(title) if Console().is_terminal else Lines(print_now, progress_lines(), title)


class Bar:
    """A `training.Display`: a progress bar with the latest numbers; the title and events stand above it."""

    ends = False

    def __init__(self, title: str, console: Console | None = None) -> None:
        self.title = title
        numbers = TextColumn("{task.fields[numbers]}")
        columns = (MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(compact=True), numbers)
        self.progress = Progress(*columns, console=console)
        self.task = self.progress.add_task("training", numbers="")

    def start(self, step: int, steps: int) -> None:
        self.info(self.title)
        self.progress.reset(self.task, total=steps, completed=step, numbers="")
        self.progress.start()

    def step(self, step: int, loss: float) -> None:
        self.progress.update(self.task, completed=step)

    def log(self, record: Mapping[str, Any], seconds_left: float) -> None:
        from ..training.logger import describe

        self.progress.update(self.task, numbers=describe(record))

    def info(self, message: str) -> None:
        self.progress.console.print(Text(printable(message)))

    def show_progress(self, what: str, done: float, total: int) -> None:
        self.progress.start()
        self.progress.update(self.task, total=total, completed=int(done), numbers=what)

    def stop(self) -> None:
        self.progress.stop()

    def leave(self) -> None:
        # rich would first wait for its own thread.
        os.write(self.progress.console.file.fileno(), SHOW_CURSOR + b"\n")


def print_now(line: str) -> None:
    """A line that is in the file at once, also when the process is killed later."""
    print(printable(line), flush=True)


def print_line(line: str, style: str = "") -> None:
    """A line that is wrapped in a terminal and left whole in a pipe."""
    console = Console(highlight=False)
    console.print(Text(printable(line), style=style), soft_wrap=not console.is_terminal)


def count(number: int, noun: str) -> str:
    """
    >>> count(1, "step"), count(2_000, "step")
    ('1 step', '2,000 steps')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def make_table(*headers: str, gap: int = 2) -> Table:
    """A table without lines beside its cells; a header that begins with ">" has its column aligned to the right."""
    # The box itself puts one space between columns.
    table = Table(box=SIMPLE_HEAD, padding=(0, gap - 1, 0, 0), pad_edge=False, show_edge=False)
    for header in headers:
        table.add_column(header.removeprefix(">"), justify="right" if header[:1] == ">" else "left", no_wrap=True)
    return table


def natural_width(table: Table) -> int:
    return Console(width=10_000).measure(table).maximum


def print_table(table: Table) -> None:
    """A table whose cells are never cut, however narrow the terminal."""
    console = Console(highlight=False)
    console.width = max(console.width, natural_width(table))
    console.print(table)
