"""Does the monitor's word come before a run fails, and not where it does not?

    python benchmarks/states.py collect --out DIR              # train all runs and keep what was read: about an hour
    python benchmarks/states.py judge --out DIR                # what the rule says of them, and what simpler rules say

Networks of several kinds, depths and initial scales are trained on the embedded digits at rates from far too low to
far too high, in a plain loop. A run has *failed* by its loss: it ends more than half of the way from the best loss
of a rate that worked to that of predicting nothing. The rule is made with the runs of seed 0, and judged by those of
other seeds and of networks that seed 0 has not.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from scalelong.diffusion import DiffusionProcess
from scalelong.diffusion.process import build_schedule
from scalelong.models import UViT
from scalelong.monitor import SkipMonitor, states

STEPS, WARMUP, BATCH, EVERY = 200, 20, 16, 10
RATES = tuple(1e-3 * 2**power for power in range(7))


@dataclass(frozen=True)
class Setting:
    """A network and what it predicts; each is trained at all rates."""

    network: str
    std: float | None
    prediction: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.network}-{self.std or 'own'}-{self.prediction}-{self.seed}"


def settings() -> Iterator[Setting]:
    """Those of seed 0, with which the rule is made, then those that judge it."""
    deep = [("uvit20", std) for std in (0.0653, 0.02, 0.083)]
    others = [
        ("uvit6", 0.0653),
        ("uvit6", 0.02),
        ("uvit12", 0.083),
        ("uvit32", 0.0653),
        ("unet", None),
        ("plain", None),
    ]
    targets = (("uvit20", 0.0653, "x0"), ("uvit20", 0.0653, "v"), ("unet", None, "x0"))
    every = [*((*network, "epsilon") for network in (*deep, *others)), *targets]
    yield from (Setting(network, std, prediction, 0) for network, std, prediction in every)
    # Seen by no rule: another depth and width, a UNet with another norm, and another seed of the others.
    new = [("wide16", std) for std in (0.0653, 0.02, 0.083)] + [("layer", None)]
    yield from (Setting(network, std, "epsilon", 2) for network, std in new)
    yield from (Setting(network, std, prediction, 1) for network, std, prediction in every)


class PlainBlock(nn.Module):
    """Two convolutions on the joined features, with the norm that is asked for. Shape: (B, C, H, W)."""

    def __init__(self, channels: int, out: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm, self.first = norm(channels), nn.Conv2d(channels, out, 3, padding=1)
        self.second, self.time = nn.Conv2d(out, out, 3, padding=1), nn.Linear(32, out)
        self.shortcut = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor, skip: Tensor | None = None) -> Tensor:
        x = x if skip is None else torch.cat([x, skip], 1)
        h = self.first(nn.functional.silu(self.norm(x))) + self.time(time)[..., None, None]
        return self.shortcut(x) + self.second(nn.functional.silu(h))


class PlainUNet(nn.Module):
    """Six skips over two resolutions."""

    def __init__(self, norm: Callable[[int], nn.Module] = lambda channels: nn.Identity(), width: int = 24) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 1, 3, padding=1)
        self.down = nn.ModuleList(PlainBlock(width, width, norm) for _ in range(6))
        self.middle = PlainBlock(width, width, norm)
        self.up = nn.ModuleList(PlainBlock(2 * width, width, norm) for _ in range(6))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t.float()[:, None] * torch.exp(-math.log(10_000.0) * torch.arange(16) / 16)
        time, x, kept = torch.cat([angles.sin(), angles.cos()], 1), self.stem(x), []
        for number, block in enumerate(self.down):
            x = block(nn.functional.avg_pool2d(x, 2) if number == 3 else x, time)
            kept.append(x)
        x = self.middle(x, time)
        for number, block in enumerate(self.up):
            x = block(nn.functional.interpolate(x, scale_factor=2.0) if number == 3 else x, time, kept.pop())
        return self.head(x)


def build(setting: Setting) -> nn.Module:
    torch.manual_seed(setting.seed)
    kind, std = setting.network, setting.std
    if kind == "unet":
        return PlainUNet(lambda channels: nn.GroupNorm(8, channels))
    if kind == "layer":
        return PlainUNet(lambda channels: nn.GroupNorm(1, channels), width=32)
    if kind == "plain":
        return PlainUNet()
    assert std is not None, "a U-ViT has an initial scale"
    depth, width = (16, 64) if kind == "wide16" else (int(kind[4:]), 48)
    return UViT(8, 2, in_chans=1, embed_dim=width, depth=depth, num_heads=4, init_std=std)


def collect(folder: Path, only: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for setting in settings():
        for rate in RATES:
            path = folder / f"{setting.name}-{rate:g}.json"
            if only in path.name and not path.exists():
                text = json.dumps(trained(setting, rate))
                path.write_text(text)
                print(path.name, flush=True)


def trained(setting: Setting, rate: float) -> dict[str, Any]:
    """A run: its losses and gradient norms, and every reading of the monitor."""
    model, process = build(setting), DiffusionProcess(build_schedule("linear"), setting.prediction)  # type: ignore[arg-type]
    images = torch.from_numpy(load_digits().images).float().div(8).sub(1).unsqueeze(1)
    generator = torch.Generator().manual_seed(setting.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.999), weight_decay=0.03)
    losses, norms = [], []
    inputs = (images[:1], torch.zeros(1))
    example = None if isinstance(model, UViT) else inputs
    with SkipMonitor(model, every=EVERY, probe_every=None, window=8, example_inputs=example) as monitor:
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / WARMUP)
            x0 = images[torch.randint(len(images), (BATCH,), generator=generator)]
            noise, t = torch.randn(x0.shape, generator=generator), process.sample_times(BATCH, generator)
            prediction = model(process.add_noise(x0, noise, t), process.model_time(t))
            loss = process.loss(prediction, x0, noise, t).mean
            optimizer.zero_grad()
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), math.inf).item())
            optimizer.step()
            monitor.step()
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                break
        readings = [
            {name: value for name, value in reading.items() if name == "step" or name.startswith("block/")}
            for reading in monitor.readings()
        ]
    nothing = process.loss_of_nothing((images - images.mean(dim=0)).square().mean().item())
    order = list(monitor.hooks.blocks)
    facts = {"rate": rate, "nothing": nothing, "order": order, "losses": losses, "norms": norms}
    return {**asdict(setting), **facts, "readings": readings}


def load(folder: Path) -> list[dict[str, Any]]:
    """The runs, each judged by its losses: whether it failed, from which step on, and how its rate compares."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for path in sorted(folder.glob("*.json")):
        run = json.loads(path.read_text())
        run["end"] = fmean(run["losses"][-30:]) if len(run["losses"]) == STEPS else math.inf
        groups[run["network"], run["std"], run["prediction"], run["seed"]].append(run)
    for group in groups.values():
        best = min(group, key=lambda run: run["end"])
        line = (best["nothing"] + min(best["end"], best["nothing"])) / 2
        for run in group:
            windows = [fmean(run["losses"][max(0, step - 20) : step]) for step in range(1, len(run["losses"]) + 1)]
            below = [step for step, mean in enumerate(windows, start=1) if step >= 20 and mean <= line]
            run["failed"] = not run["end"] <= line
            run["collapse"] = (below[-1] + 1 if below else None) if run["failed"] else None
            run["above"] = run["rate"] > best["rate"]
    return [run for group in groups.values() for run in group]


def first_word(run: dict[str, Any], limit: float) -> int | None:
    """The step of the first reading at which the monitor's rule says that a block grows."""
    watch, states.LIMIT = states.StateWatch(run["nothing"]), limit
    for reading in run["readings"]:
        watch.update(reading["step"], reading, run["order"])
        if watch.status.state != "steady":
            return reading["step"]
    return None


def by_norm(run: dict[str, Any], limit: float) -> int | None:
    """The same of a plain threshold on the gradient's norm, over its median up to then."""
    norms = run["norms"]
    steps = range(WARMUP + 1, len(norms) + 1)
    return next((step for step in steps if not norms[step - 1] <= limit * median(norms[: step - 1])), None)


def by_cusum(run: dict[str, Any], limit: float) -> int | None:
    """The same of CUSUM on the loss: how far it has risen above the mean of the last 20 steps, in their deviations."""
    total, losses = 0.0, run["losses"]
    for step in range(WARMUP + 1, len(losses) + 1):
        before = losses[step - 1 - WARMUP : step - 1]
        total = max(0.0, total + (losses[step - 1] - fmean(before)) / (stdev(before) or 1.0) - 0.5)
        if not total <= limit:
            return step
    return None


RULES = {"a block grows": (first_word, (50.0, 200.0, 500.0, 2000.0)), "gradient norm": (by_norm, (3.0, 10.0, 30.0))}
RULES["CUSUM of the loss"] = (by_cusum, (4.0, 8.0, 16.0))


def judge(folder: Path, file: Path | None) -> None:
    """A table of each rule's words, on the runs that made it and on the others."""
    runs = load(folder)
    if file is not None:
        keys = ("network", "std", "prediction", "seed", "rate", "end", "failed", "collapse", "above")
        rows = [{**{key: run[key] for key in keys}, "word": first_word(run, 500.0)} for run in runs]
        file.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    print("| runs | rule | limit | at or below the best rate | failed and announced | above, but not failed | lead |")
    print("| --- | --- | ---: | ---: | ---: | ---: | --- |")
    for name, chosen in (("seed 0", [r for r in runs if r["seed"] == 0]), ("held out", [r for r in runs if r["seed"]])):
        low, failed = [r for r in chosen if not r["above"]], [r for r in chosen if r["failed"]]
        high = [r for r in chosen if r["above"] and not r["failed"]]
        for rule, (word, limits) in RULES.items():
            for limit in limits:
                said = [sum(word(run, limit) is not None for run in some) for some in (low, failed, high)]
                late = [run["collapse"] - step for run in failed if run["collapse"] and (step := word(run, limit))]
                lead = f"{median(late):g} ({min(late)} to {max(late)}, {len(late)} runs)" if late else "–"
                shares = " | ".join(f"{n} of {len(some)}" for n, some in zip(said, (low, failed, high), strict=True))
                print(f"| {name} | {rule} | {limit:g} | {shares} | {lead} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["collect", "judge"])
    parser.add_argument("--out", type=Path, required=True, help="the folder of the runs")
    parser.add_argument("--only", default="", help="runs with this in their name")
    parser.add_argument("--json", type=Path, help="also write what became of each run here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    collect(options.out, options.only) if options.what == "collect" else judge(options.out, options.json)


if __name__ == "__main__":
    main()
