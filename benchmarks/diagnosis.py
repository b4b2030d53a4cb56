"""Does the monitor's diagnosis find runs that go wrong, keep quiet about healthy ones, and name the right block?

    python benchmarks/diagnosis.py                                             # all on the digits: about 15 minutes
    python benchmarks/diagnosis.py --cifar10 path/to/cifar10 --seeds 1         # CIFAR-10 instead: about 30 minutes
    python benchmarks/diagnosis.py --planted                                   # disturbances only: about 5 minutes

First every network is trained by the trainer with several rates, with and without CS, on the same data, and each run is
judged by its loss alone: one rate is the *best*, *lower* ones are healthy, and a higher one has *failed* if its last
losses are more than 1.5 times the best one's or not finite, and *learns still* otherwise. Then one block or one skip of
a healthy network is disturbed on purpose, and the diagnosis should name it.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from planted import PLANTS, Planted, plant_all

from scalelong.config import load_recipe
from scalelong.guard.losses import TrainingDiverged
from scalelong.monitor import Diagnosis, SkipMonitor
from scalelong.runs import read_metrics
from scalelong.training import train
from scalelong.training.logger import Silent

LAST = 30
"""The losses by which a run is judged."""
FAILED = 1.5
INTERVALS = (1, 5, 10)
VERDICTS = ("lower", "best", "learns still", "failed")

COMMON = (
    *("training.monitor_every=1", "training.log_every=1", "training.validate_every=null", "training.sample_every=null"),
    *("optim.warmup_steps=20", "data.validation_count=16", "diffusion.schedule=linear", "diffusion.prediction=epsilon"),
)
SMALL = ("model.embed_dim=32", "training.batch_size=16", "training.steps=150")
TINY = ("training.batch_size=8", "training.steps=120")


@dataclass(frozen=True)
class Network:
    name: str
    recipe: str
    sets: tuple[str, ...]
    rates: tuple[float, ...]


DIGITS = [
    Network(f"digits, U-ViT {depth}", "digits", (*SMALL, f"model.depth={depth}"), (1e-3, 4e-3, 2e-2, 1e-1))
    for depth in (6, 12, 20)
]
CIFAR10 = [
    Network(f"CIFAR-10, {name}", f"cifar10-tiny-{kind}", TINY, (5e-4, 3e-3, 2e-2, 1e-1))
    for kind, name in (("uvit", "U-ViT 8"), ("unet", "UNet"))
]


@dataclass(frozen=True)
class Run:
    """One run: what its loss says, and what the diagnosis said, for each interval between readings."""

    network: str
    method: str
    rate: float
    clip: str
    seed: int
    loss: float
    """The mean of the last ones."""
    found: dict[int, str | None]
    steps: dict[int, int | None]
    verdict: str = ""


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    runs = [] if options.planted else list(train_all(options.cifar10, options.seeds))
    planted = [] if options.cifar10 else list(plant_all(options.seeds))
    print(table_of_runs(runs), table_of_planted(planted), sep="\n\n")
    if options.json:
        record = {"runs": [asdict(run) for run in runs], "planted": [asdict(found) for found in planted]}
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar10", type=Path, help="train on CIFAR-10 instead: a folder with its parquet files")
    parser.add_argument("--planted", action="store_true", help="only disturb networks on purpose")
    # Seed 0 is the one that the rule was made with.
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="runs of each kind")
    parser.add_argument("--json", type=Path, help="also write every run here")
    return parser.parse_args()


def train_all(cifar10: Path | None, seeds: list[int]) -> Iterator[Run]:
    source = () if cifar10 is None else (f"data.source={cifar10}",)
    for network in DIGITS if cifar10 is None else CIFAR10:
        for method, clip, seed in variants(network, seeds):
            runs = [trained(network, source, method, rate, clip, seed) for rate in network.rates]
            for run in judged(runs):
                print(describe(run), flush=True)
                yield run


def variants(network: Network, seeds: list[int]) -> Iterator[tuple[str, str, int]]:
    """Methods, clipping and seeds; clipping, which Adam hardly notices, is varied in one network only."""
    for method, seed in product(("none", "cs"), seeds):
        yield method, "null", seed
        if network is DIGITS[1] and seed == seeds[0]:
            yield method, "1.0", seed


def trained(network: Network, source: tuple[str, ...], method: str, rate: float, clip: str, seed: int) -> Run:
    kappa = "0.7" if method == "cs" else "null"
    scaling = (f"scaling.method={method}", f"scaling.kappa={kappa}", "scaling.where=input")
    sets = (*network.sets, *source, *COMMON, *scaling, f"optim.lr={rate}", f"optim.clip_norm={clip}", f"seed={seed}")
    made: list[SkipMonitor] = []

    def monitor(*args: Any, **kwargs: Any) -> SkipMonitor:
        made.append(SkipMonitor(*args, **kwargs | {"probe_every": None}))
        return made[0]

    with tempfile.TemporaryDirectory() as folder:
        try:
            train(load_recipe(network.recipe, sets), folder, display=Silent(), monitor=monitor)
            lines = read_metrics(Path(folder) / "metrics.jsonl")
            last = [line["loss"] for line in lines if "lr" in line][-LAST:]
        except TrainingDiverged:
            last = [math.nan]
    found = {every: replayed(made[0], every) for every in INTERVALS}
    texts = {every: None if diagnosis is None else str(diagnosis) for every, diagnosis in found.items()}
    steps = {every: None if diagnosis is None else diagnosis.step for every, diagnosis in found.items()}
    return Run(network.name, method, rate, clip, seed, sum(last) / len(last), texts, steps)


def replayed(monitor: SkipMonitor, every: int) -> Diagnosis | None:
    """What the diagnosis would have been with fewer readings of the same run."""
    twin = SkipMonitor(monitor.model, every=every, probe_every=None)
    twin.hooks.order = monitor.hooks.order
    count = len(twin.table.names)
    twin.pending = [(step, row[:count]) for step, row in monitor.records if step % every == 0]
    return twin.diagnosis()


def judged(runs: list[Run]) -> list[Run]:
    """The runs of one network, which differ in their rate, with what their losses say."""
    best = min(runs, key=lambda run: run.loss if math.isfinite(run.loss) else math.inf)

    def verdict(run: Run) -> str:
        if run.rate <= best.rate:
            return "best" if run is best else "lower"
        return "learns still" if run.loss <= FAILED * best.loss else "failed"

    return [Run(**{**asdict(run), "verdict": verdict(run)}) for run in runs]


def describe(run: Run) -> str:
    what = f"{run.network}, {run.method}, rate {run.rate:g}, clip {run.clip}, seed {run.seed}"
    return f"{what}: loss {run.loss:.3f}, {run.verdict}; {run.steps}; {run.found[1]}"


def table_of_runs(runs: list[Run]) -> str:
    """How many runs of each verdict were diagnosed, with a reading every step and with fewer."""
    lines = ["| network | rate | runs | " + " | ".join(f"diagnosed, every {n}" for n in INTERVALS) + " |"]
    lines.append("| --- " * (3 + len(INTERVALS)) + "|")
    for network, verdict in product(dict.fromkeys(run.network for run in runs), VERDICTS):
        chosen = [run for run in runs if (run.network, run.verdict) == (network, verdict)]
        if chosen:
            counts = [sum(run.found[every] is not None for run in chosen) for every in INTERVALS]
            lines.append(f"| {network} | {verdict} | {len(chosen)} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def table_of_planted(planted: list[Planted]) -> str:
    """How often the disturbed block or skip was named, where there was a diagnosis."""
    lines = ["| network | disturbed | cases | diagnosed | named right |", "| --- | --- | --- | --- | --- |"]
    for network, plant in product(dict.fromkeys(found.network for found in planted), PLANTS):
        chosen = [found for found in planted if (found.network, found.plant) == (network, plant)]
        counts = Counter(found.outcome for found in chosen)
        diagnosed = len(chosen) - counts["quiet"]
        if chosen:
            lines.append(f"| {network} | {plant} | {len(chosen)} | {diagnosed} | {counts['right']} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
