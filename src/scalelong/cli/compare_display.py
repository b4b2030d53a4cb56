"""What a comparison prints: its progress while it runs, and its results in the end."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..compare.grid import PlannedRun
from ..compare.run import Display, Progress
from ..training.logger import clock
from .console import NOTHING, make_table, print_line, print_now, print_table
from .edge_display import print_sentences, ranged

MARKS = {"finished": "●", "failed": "✗", "broken": "!", "running": "◐", "pending": "·"}
LINE_SECONDS = 30.0

Results = Mapping[str, Any]


def choose_display() -> Display:
    """A table that is kept up to date in a terminal, plain lines in a pipe or a file."""
    return LiveTable() if Console().is_terminal else Lines()


class Lines(Display):
    """One line for each run that ends, and how far all are every half minute."""

    def __init__(self) -> None:
        self.printed = time.monotonic()

    def start(self, progress: Progress) -> None:
        print_now(f"{len(progress.states)} runs of {progress.plan.steps} steps, {progress.ended} of them done")

    def update(self, progress: Progress) -> None:
        if time.monotonic() - self.printed > LINE_SECONDS:
            self.printed = time.monotonic()
            print_now(overall(progress))

    def ended(self, progress: Progress, run: PlannedRun, message: str | None) -> None:
        loss = progress.state(run).loss
        shown = "" if loss is None else f", validation loss {loss:.4f}"
        print_now(f"{describe_end(progress, run, message)}{shown}; {overall(progress)}")

    def info(self, message: str) -> None:
        print_now(message)


class LiveTable(Display):
    """A table of all arms, redrawn in place."""

    def __init__(self) -> None:
        self.live = Live(auto_refresh=False, transient=True)

    def start(self, progress: Progress) -> None:
        self.live.start()
        self.update(progress)

    def update(self, progress: Progress) -> None:
        self.live.update(progress_table(progress), refresh=True)

    def ended(self, progress: Progress, run: PlannedRun, message: str | None) -> None:
        if message:
            self.info(describe_end(progress, run, message))
        self.update(progress)

    def info(self, message: str) -> None:
        self.live.console.print(Text(message))

    def stop(self) -> None:
        self.live.stop()


def describe_end(progress: Progress, run: PlannedRun, message: str | None) -> str:
    return f"{run.arm.id} seed {run.seed} {progress.state(run).status}" + (f": {message}" if message else "")


def progress_table(progress: Progress) -> Table:
    """One row for each arm: a mark for every seed, how far they are, and the mean of their last validation losses."""
    plan = progress.plan
    several = len({arm.setting for arm in plan.arms}) > 1
    table = make_table("method", *(["setting"] if several else []), "seeds", ">done", ">validation loss")
    table.caption = overall(progress)
    for arm in plan.arms:
        states = progress.of_arm(arm)
        # A run that failed or broke is done, however few its steps.
        done = [min(1, s.step / plan.steps) if s.status in ("pending", "running") else 1 for s in states]
        losses = [state.loss for state in states if state.loss is not None]
        loss = f"{statistics.fmean(losses):.4f}" if losses else ""
        marks = "".join(MARKS[state.status] for state in states)
        setting = [arm.setting] if several else []
        table.add_row(*map(Text, [arm.label, *setting, marks, f"{statistics.fmean(done):.0%}", loss]))
    return table


def overall(progress: Progress) -> str:
    left = progress.seconds_left()
    time_left = "" if left is None else f", about {clock(left)} left"
    return f"{progress.ended} of {len(progress.states)} runs done{time_left}"


def print_results(results: Results) -> None:
    """A table of the arms for each setting, a sentence for each method, and what to beware of."""
    for setting in dict.fromkeys(arm["setting"] for arm in results["arms"]):
        arms = [arm for arm in results["arms"] if arm["setting"] == setting]
        print_line(f"{results['recipe']}, {setting}, {results['steps']:,} steps", style="bold")
        print_table(setting_table(arms, results["comparisons"]))
        for line in quality_lines(arms):
            print_line(line)
        for pair in results["comparisons"]:
            if pair["setting"] == setting and pair["pairs"]:
                print_line(f"- {pair['sentence']}{loss_sentence(pair['final_loss'])}")
    if results["rate_sensitivity"]:
        print_line("sensitivity to the learning rate: the loss given away, on average, by not knowing the best", "bold")
        print_table(rate_table(results["rate_sensitivity"]))
        print_sentences(results)
    for warning in results["warnings"]:
        print_line(f"warning: {warning}", style="yellow")


def setting_table(arms: Sequence[Results], comparisons: Sequence[Results]) -> Table:
    pairs = {pair["arm"]: pair for pair in comparisons}
    name = next((arm["fd_curve"]["name"] for arm in arms if arm["fd_curve"]), None)
    measured = [">validation loss", *([f">{name}"] if name else []), ">speed-up, steps", ">speed-up, seconds"]
    table = make_table("method", *measured, ">oscillation:\nfeatures", ">\ngradients", ">failed")
    for arm in arms:
        pair, failed = pairs.get(arm["id"], {}), arm["failed"]
        table.add_row(
            Text(arm["label"]),
            with_interval(arm["final_loss"], ".4f"),
            *([with_interval(arm["final_fd"], ".1f")] if name else []),
            *(ranged(pair.get(f"speedup_{clock}"), ".2f", "×") for clock in ("steps", "seconds")),
            *(with_interval(arm["oscillation"][kind], ".1%") for kind in ("feature", "gradient")),
            f"{failed['count']} of {failed['of']}",
        )
    return table


def quality_lines(arms: Sequence[Results]) -> list[str]:
    """What training did for the distance, for arms that were evaluated at the same steps, and what the EMA did."""
    falls: dict[str, list[str]] = {}
    for arm in arms:
        curve = arm["fd_curve"]
        if curve and len(steps := curve["steps"]) > 1:
            ends = " → ".join(number(curve["mean"][place], ".0f") for place in (0, -1))
            what = f"{curve['name']} from step {steps[0]:,} to {steps[-1]:,}"
            falls.setdefault(what, []).append(f"{arm['label']} {ends}")
    raw = [f"{arm['label']} {number(arm['final_fd_raw']['value'], '.0f')}" for arm in arms if arm["final_fd_raw"]]
    if raw:
        falls["at the end with raw weights instead of EMA weights"] = raw
    return [f"{what}: {', '.join(values)}" for what, values in falls.items()]


def loss_sentence(loss: Results | None) -> str:
    """The paired test of the final losses."""
    if loss is None or loss["p"] is None:
        return ""
    half = (loss["high"] - loss["low"]) / 2
    return f" Final validation loss {loss['difference']:+.4f} ± {half:.4f} (paired t, p = {loss['p']:.2g})."


def rate_table(sweeps: Sequence[Results]) -> Table:
    rates = list(dict.fromkeys(rate for sweep in sweeps for rate in sweep["rates"]))
    table = make_table("method", *(f">lr {rate:g}" for rate in rates), ">sensitivity", ">largest stable")
    for sweep in sweeps:
        losses = dict(zip(sweep["rates"], sweep["losses"], strict=True))
        setting = f"{sweep['label']}, depth {sweep['depth']}, batch {sweep['batch']}"
        cells = [number(losses.get(rate), ".4f", "failed" if rate in losses else NOTHING) for rate in rates]
        stable = number(sweep["largest_stable_rate"], "g")
        table.add_row(Text(setting), *cells, ranged(sweep["sensitivity"], ".4f"), stable)
    return table


def with_interval(found: Results | None, form: str) -> str:
    """Such as 0.1234 ± 0.0010."""
    if found is None or found["value"] is None:
        return NOTHING
    half = "" if found["low"] is None else f" ± {(found['high'] - found['low']) / 2:{form}}"
    return f"{found['value']:{form}}{half}"


def number(value: float | None, form: str, missing: str = NOTHING) -> str:
    return missing if value is None else f"{value:{form}}"
