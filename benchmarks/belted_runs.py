"""What a seat belt saves: runs at the edge rate and above it, with and without one, and how they end.

python benchmarks/belted_runs.py --data cifar10-folder --out runs/seat-belt --seeds 2 --steps 400

Prints the table of docs/seat-belt.md. Runs that are there are not made again. Half a minute for a run
of 400 steps on an idle core.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from scalelong.config import load_recipe
from scalelong.guard.losses import TrainingDiverged
from scalelong.runs import Run, read_metrics
from scalelong.training import train
from scalelong.training.logger import Silent

EDGE = 4e-3


def run(folder: Path, lr: float, seed: int, belted: bool, steps: int, recipe: str, data: str | None) -> list[dict]:
    """The lines of a run's metrics; made if they are not there."""
    settings = {
        **({} if data is None else {"data.source": data}),
        **{"optim.lr": lr, "seed": seed, "scaling.method": "none", "scaling.kappa": "null"},
        **{"training.seat_belt": str(belted).lower(), "training.monitor_every": "null", "training.steps": steps},
        **{"training.checkpoint_every": steps, "training.validate_every": steps, "training.sample_every": "null"},
    }
    config = load_recipe(recipe, [f"{key}={value}" for key, value in settings.items()])
    try:
        if train(config, folder, display=Silent()).signal is not None:
            raise KeyboardInterrupt
    except TrainingDiverged as error:
        print(f"{folder.name}: {error}", flush=True)
    return read_metrics(Run(folder).metrics.path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="cifar10-deep")
    parser.add_argument("--data", help="instead of the recipe's data.source")
    parser.add_argument("--out", type=Path, default=Path("runs/seat-belt"))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--factors", type=int, nargs="+", default=[1, 4, 8, 16], help="times the rate of the edge")
    options = parser.parse_args()
    print("| rate | seat belt | EMA validation loss | restorations | rate at the end |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    for factor in options.factors:
        for belted in (False, True):
            ends, returns, rates = [], [], []
            for seed in range(options.seeds):
                lr = factor * EDGE
                folder = options.out / f"lr{lr:g}-{'belt' if belted else 'none'}-{seed}"
                lines = run(folder, lr, seed, belted, options.steps, options.recipe, options.data)
                losses = [float(line["validation_loss_ema"]) for line in lines if "validation_loss_ema" in line]
                ends.append(losses[-1] if losses else math.nan)
                returns.append(sum(line.get("event") == "rollback" for line in lines))
                rates.append(next((line["lr"] for line in reversed(lines) if "lr" in line), math.nan))
            shown = (", ".join(f"{value:.4f}" for value in ends), ", ".join(map(str, returns)))
            final = ", ".join(f"{rate:.1e}" for rate in rates)
            print(
                f"| {factor} × {EDGE:g} | {'yes' if belted else 'no'} | {shown[0]} | {shown[1]} | {final} |", flush=True
            )


if __name__ == "__main__":
    main()
