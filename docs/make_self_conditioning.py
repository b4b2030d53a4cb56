"""Write docs/results/self-conditioning.json and the table of docs/self-conditioning.md.

python docs/make_self_conditioning.py RUNS    # a folder of runs <plain|self>-<method>-<seed>, each trained and probed
python docs/make_self_conditioning.py         # the table alone, from the file
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from scalelong.compare.intervals import Difference, paired_difference
from scalelong.runs import Run, read_metrics

DOCS = Path(__file__).parent
PAGE, FILE = DOCS / "self-conditioning.md", DOCS / "results" / "self-conditioning.json"
METHODS = {"none": "without scaling", "cs": "CS κ = 0.7"}

Measure = Callable[[dict[str, Any]], float]
MEASURES: dict[str, tuple[Measure, str]] = {
    "held-out loss": (lambda run: run["loss"], ".5f"),
    "probe, best cell, held out": (lambda run: run["correct"] / run["held_out"], ".2%"),
    "probe, middle block": (lambda run: max(run["accuracies"]["mid_block"]), ".2%"),
}


def main() -> None:
    if len(sys.argv) > 1:
        folders = sorted(path.parent for path in Path(sys.argv[1]).glob("*/probe.json"))
        runs = [read_run(folder) for folder in folders]
        FILE.write_text(json.dumps({"settings": settings(folders[0]), "runs": runs}, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), read_runs()), encoding="utf-8")


def read_run(folder: Path) -> dict[str, Any]:
    arm, method, seed = folder.name.split("-")
    line = [line for line in read_metrics(folder / "metrics.jsonl") if "validation_loss_ema" in line][-1]
    probe = json.loads((folder / "probe.json").read_bytes())
    kept = {key: probe[key] for key in ("block", "time", "correct", "held_out")}
    accuracies = {
        block: [round(x, 4) for x in row] for block, row in zip(probe["blocks"], probe["accuracies"], strict=True)
    }
    found = {
        "arm": arm,
        "method": method,
        "seed": int(seed),
        "steps": line["step"],
        "loss": line["validation_loss_ema"],
    }
    return found | kept | {"times": probe["times"], "accuracies": accuracies}


def settings(folder: Path) -> dict[str, Any]:
    """What all runs share; where the data lay is nobody's business."""
    config = Run(folder).config().model_dump(mode="json", include={"model", "optim", "training"})
    del config["model"]["self_conditioning"]
    return config | {"commit": json.loads((folder / "environment.json").read_bytes())[0]["commit"]}


def read_runs() -> list[dict[str, Any]]:
    return json.loads(FILE.read_bytes())["runs"]


def filled(text: str, runs: list[dict[str, Any]]) -> str:
    return re.sub(
        r"(<!-- table -->\n\n).*?(\n\n<!-- end -->)", lambda m: m[1] + table(runs) + m[2], text, flags=re.DOTALL
    )


def table(runs: list[dict[str, Any]]) -> str:
    rows = ["| | scaling | seeds | plain | self-conditioned | difference, 95 % interval | p |", "| --- " * 7 + "|"]
    for name, (measure, form) in MEASURES.items():
        for method, title in METHODS.items():
            pairs = list(paired(runs, method, measure))
            first, second = zip(*pairs, strict=True)
            means = " | ".join(format(sum(values) / len(values), form) for values in (second, first))
            rows.append(
                f"| {name} | {title} | {len(pairs)} | {means} | {show(paired_difference(first, second), form)} |"
            )
    return "\n".join(rows)


def paired(runs: list[dict[str, Any]], method: str, measure: Measure) -> Iterable[tuple[float, float]]:
    """Self-conditioned and plain of each seed that has both."""
    found = {(run["arm"], run["seed"]): measure(run) for run in runs if run["method"] == method}
    seeds = sorted({seed for _, seed in found})
    return [
        (found["self", seed], found["plain", seed]) for seed in seeds if {("self", seed), ("plain", seed)} <= set(found)
    ]


def show(found: Difference, form: str) -> str:
    if found.value is None or found.low is None or found.high is None or found.p is None:
        return "– | –"
    value, low, high = (format(number, f"+{form}").replace("-", "−") for number in (found.value, found.low, found.high))
    return f"{value} ({low} to {high}) | {found.p:.2g}"


if __name__ == "__main__":
    main()
