"""Folders of runs and comparisons with made-up but plausible numbers, as the trainer and `compare` write them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

METHODS = {"none": 1.0, "uniform": 1.05, "cs": 1.35, "ls": 1.5}
"""How much faster each one learns here."""
LABELS = {"none": "no scaling", "uniform": "uniform 0.707", "cs": "CS κ=0.7", "ls": "LS"}
HOSTILE = '</script><img src=x onerror="window.hacked=1"><b>{{7*7777}}\'"&lt;'

SKIPS = 6


def loss_at(step: float, speed: float, jitter: float = 0.0) -> float:
    return (0.105 + 0.5 / (1 + speed * step / 90)) * (1 + jitter)


def write_json(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@contextmanager
def edited(path: Path) -> Iterator[Any]:
    """What a JSON file holds; it is written back with what was changed."""
    content = json.loads(path.read_text(encoding="utf-8"))
    yield content
    write_json(path, content)


def write_run(
    folder: Path,
    *,
    method: str = "cs",
    seed: int = 0,
    steps: int = 3200,
    until: int | None = None,
    name: str = "digits",
    watched: bool = False,
    diverges: bool = False,
) -> Path:
    """A run's folder that ends at `until`; one that diverges has numbers that are not finite, and says so."""
    folder.mkdir(parents=True, exist_ok=True)
    scaling = {"method": method, "where": "input", "kappa": 0.7 if method == "cs" else None}
    config = {
        **{"name": name, "description": "scikit-learn's handwritten digits", "seed": seed},
        "data": {"source": "sklearn:digits", "image_size": 8, "channels": 1},
        "model": {"kind": "uvit", "embed_dim": 64, "depth": 6},
        **{"optim": {"lr": 0.004}, "training": {"steps": steps, "batch_size": 128}, "scaling": scaling},
    }
    # JSON is YAML too.
    write_json(folder / "config.yaml", config)
    versions = {"scalelong": "0.1.0", "python": "3.11.7", "torch": "2.13.0"}
    command = ["scalelong", "train", name, "--set", f"scaling.method={method}", "--set", f"seed={seed}"]
    write_json(folder / "environment.json", [{"command": command, "versions": versions, "device": "cpu", "seed": seed}])
    lines = run_lines(method, seed, steps if until is None else until, watched=watched)
    lines += diverged_lines(lines[-1]["step"]) if diverges else []
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    draw_grid(folder / "samples" / f"step-{lines[-1]['step']:06d}.png", seed)
    return folder


def run_lines(method: str, seed: int, until: int, *, watched: bool) -> list[dict[str, Any]]:
    draws, speed, lines = random.Random(f"{method} {seed}"), METHODS.get(method, 1.0), []
    for step in range(50, until + 1, 50):
        loss = loss_at(step, speed, draws.gauss(0, 0.03))
        lines.append({"step": step, "loss": loss, "lr": 0.004, "grad_norm": loss / 2, "seconds": step * 0.019})
        if watched:
            lines.append({"step": step, **reading(step, draws)})
        if step % 400 == 0 or step == until:
            held = loss_at(step, speed, draws.gauss(0, 0.01))
            lines.append({"step": step, "validation_loss": held * 1.03, "validation_loss_ema": held})
    return lines


def reading(step: int, draws: random.Random) -> dict[str, float]:
    """What the monitor writes."""
    found = {"robustness": 1.4 + draws.gauss(0, 0.05)}
    for skip in range(1, SKIPS + 1):
        size = 12 / skip * (1 + draws.gauss(0, 0.1))
        found |= {f"skip{skip}/feature": size, f"skip{skip}/gradient": size / 900, f"skip{skip}/share": 0.4}
        kappa = 0.5 + 0.4 * math.exp(-skip / 3)
        found |= {f"skip{skip}/coefficient": kappa}
        found |= {f"skip{skip}/coefficient_low": kappa - 0.1, f"skip{skip}/coefficient_high": kappa + 0.08}
    for block in ("in_blocks.0", "mid_block", "out_blocks.0"):
        found |= {f"block/{block}/feature_oscillation": abs(0.1 + draws.gauss(0, 0.03))}
        found |= {f"block/{block}/gradient_oscillation": abs(0.4 + draws.gauss(0, 0.05))}
    return found


def diverged_lines(step: int) -> list[dict[str, Any]]:
    bad = {"loss": "nan", "grad_norm": "inf"}
    return [
        {"step": step + 10, "event": "spike", "loss": 9.5, "typical": 0.14, "deviations": 31.0},
        {"step": step + 20, "event": "skipped", **bad, "origin": "the output of mid_block.attn is not finite"},
        {"step": step, "event": "rollback", "from_step": step + 26},
        {"step": step + 50, "loss": "nan", "lr": 0.004, "grad_norm": "inf", "seconds": 20.0},
        {"step": step + 50, "validation_loss": "inf", "validation_loss_ema": "nan"},
        {"step": step + 60, "event": "diverged", "message": "training diverged: after 3 rollbacks, still not finite."},
    ]


def draw_grid(path: Path, seed: int, *, size: int = 73, factor: int = 6) -> Path:
    """A grey grid like those of the trainer, every pixel repeated `factor` times in both directions."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = random.Random(seed).randbytes(size * size)
    small = Image.frombytes("L", (size, size), pixels)
    small.resize((size * factor, size * factor), Image.Resampling.NEAREST).save(path)
    return path


def write_comparison(
    folder: Path, *, seeds: int = 3, recipe: str = "digits", rates: tuple[float, ...] = (0.004,), done: bool = True
) -> Path:
    """Four methods, some seeds; an unfinished one lacks the runs of LS and all that needs them."""
    arms = [write_arm(folder, method, rate, seeds, done, len(rates) > 1) for rate in rates for method in METHODS]
    pairs = [write_pair(arm) for arm in arms if arm["method"] != "none" and arm["loss_curve"]]
    total = len(arms) * seeds
    results = {
        **{"version": 1, "recipe": recipe, "description": "scikit-learn's handwritten digits with a small U-ViT"},
        "command": f"scalelong compare {recipe} --methods {','.join(METHODS)} --seeds {seeds}",
        **{"created": "2026-11-16T16:00:00+00:00", "updated": "2026-11-16T16:12:00+00:00"},
        "status": "finished" if done else "running",
        **{"runs_done": total if done else total * 3 // 4, "runs_total": total},
        "environment": {"versions": {"scalelong": "0.1.0", "torch": "2.13.0"}, "threads": 1, "workers": 2},
        **{"steps": 3200, "baseline": arms[0]["id"], "confidence": 0.95},
        "parameters": {arm["id"]: 368_745 if arm["method"] == "ls" else 368_720 for arm in arms},
        **{"arms": arms, "comparisons": pairs, "warnings": []},
        "rate_sensitivity": [sensitivity(method, rates) for method in METHODS] if len(rates) > 1 else [],
    }
    write_json(folder / "results.json", results)
    write_json(folder / "comparison.json", {"recipe": recipe})
    write_json(folder / "kappa.json", KAPPA)
    return folder


KAPPA = {
    **{"kappa": 0.61, "where": "input", "band": [0.402, 0.818], "num_skips": SKIPS, "sum_of_squares": [1.19, 2.87]},
    **{"images": 1541, "block_gain": 1.31, "reasons": ["The output matches the target's size from 0.402 to 0.818."]},
}


def write_arm(folder: Path, method: str, rate: float, seeds: int, done: bool, several: bool) -> dict[str, Any]:
    key = f"{method}-lr{rate}" if several else method
    pending = not done and method == "ls"
    runs = []
    for seed in range(seeds):
        place = f"runs/{key}/seed-{seed}"
        write_run(folder / place, method=method, seed=seed, until=900 if pending else None)
        status = "running" if pending else "finished"
        numbers = {"seconds": 61.2, "seconds_per_step": 0.019, "final_loss": loss_at(3200, METHODS[method])}
        runs.append({"seed": seed, "folder": place, "status": status, "step": 900 if pending else 3200, **numbers})
    head = {"id": key, "label": LABELS[method], "method": method, "options": {}, "lr": rate, "depth": 6, "batch": 128}
    head |= {"setting": f"lr {rate}, depth 6, batch 128", "runs": runs}
    return head | (dict.fromkeys(RESULTS) if pending else arm_results(method, seeds))


RESULTS = (
    *("final_loss", "final_fd", "loss_curve", "fd_curve", "oscillation", "oscillation_curve"),
    *("failed", "coefficients", "noise_robustness"),
)


def arm_results(method: str, seeds: int) -> dict[str, Any]:
    speed, draws = METHODS[method], random.Random(method)
    steps = list(range(200, 3201, 200))
    curve = banded("steps", steps, [loss_at(step, speed) for step in steps], 0.02, draws, seeds)
    fd = banded("steps", steps[3::4], [9 + 160 / (1 + speed * step / 150) for step in steps[3::4]], 0.06, draws, seeds)
    calm = 0.32 / speed**2
    sigma, index = [0.0, 0.1, 0.2, 0.3, 0.4], list(range(1, SKIPS + 1))
    shaken = [
        abs(calm * (1 + 1.5 * math.exp(-step / 500)) * (1 + draws.gauss(0, 0.08))) for step in range(50, 3201, 50)
    ]
    coefficients = {"cs": [0.7 ** (i - 1) for i in index], "ls": [0.5 + 0.4 * math.exp(-i / 3) for i in index]}.get(
        method
    )
    spread = 0.06 if method == "ls" else 0.0
    noise = [0.1 + s * s * (2.2 - speed) for s in sigma]
    return {
        "final_loss": {"value": curve["mean"][-1], "low": curve["low"][-1], "high": curve["high"][-1]},
        "final_fd": {"value": fd["mean"][-1], "low": fd["low"][-1], "high": fd["high"][-1]},
        "loss_curve": curve,
        "fd_curve": {"name": "FD-EffNet", **fd},
        "oscillation": {"feature": estimate(calm, 0.1), "gradient": estimate(2.3 * calm, 0.14)},
        "oscillation_curve": {
            "steps": list(range(50, 3201, 50)),
            "feature": shaken,
            "gradient": [2.3 * value for value in shaken],
        },
        "failed": {"count": 0, "of": seeds, "low": 0.0, "high": 0.56},
        "coefficients": coefficients and banded("index", index, coefficients, spread, draws, 0),
        "noise_robustness": banded("sigma", sigma, noise, 0.03, draws, 0),
    }


def estimate(value: float, share: float) -> dict[str, float]:
    return {"value": value, "low": value * (1 - share), "high": value * (1 + share)}


def banded(
    x: str, places: list[Any], mean: list[float], share: float, draws: random.Random, runs: int
) -> dict[str, Any]:
    own = [[value * (1 + draws.gauss(0, share)) for value in mean] for _ in range(runs)]
    low, high = ([value * (1 + sign * 1.5 * share) for value in mean] for sign in (-1, 1))
    return {x: places, "mean": mean, "low": low, "high": high, **({"runs": own} if runs else {})}


def write_pair(arm: dict[str, Any]) -> dict[str, Any]:
    speed, label = METHODS[arm["method"]], arm["label"]
    shown = speed > 1.2
    sentence = (
        f"{label} reaches the final validation loss of no scaling in {speed:.2f}× fewer steps (95 % interval "
        f"{speed * 0.88:.2f} – {speed * 1.13:.2f}, 3 pairs)."
        if shown
        else f"No difference shown between {label} and no scaling (0.92 – 1.19); about 7 more seeds would settle it."
    )
    difference = {"difference": -0.004 * (speed - 1), "low": -0.006 * (speed - 0.8), "high": 0.0005, "p": 0.04 / speed}
    return {
        **{
            "arm": arm["id"],
            "baseline": arm["id"].replace(arm["method"], "none"),
            "setting": arm["setting"],
            "pairs": 3,
        },
        **{"speedup_steps": estimate(speed, 0.12), "speedup_seconds": estimate(0.98 * speed, 0.14)},
        **{"verdict": "faster" if shown else "no difference shown", "sentence": sentence},
        "sentence_seconds": sentence.replace("steps", "seconds").replace("shown", "shown in seconds"),
        **{"more_seeds": None if shown else 7, "final_loss": difference, "final_fd": None, "oscillation": None},
    }


def sensitivity(method: str, rates: tuple[float, ...]) -> dict[str, Any]:
    losses = [0.12 + 0.05 * abs(math.log(rate / 0.004)) / METHODS[method] for rate in rates]
    losses[-1] = losses[-1] if METHODS[method] > 1.2 else "inf"  # type: ignore[call-overload]
    finite = [loss for loss in losses if not isinstance(loss, str)]
    low, high = ([loss * factor for loss in finite] for factor in (0.97, 1.03))
    return {
        **{"method": method, "label": LABELS[method], "depth": 6, "batch": 128, "rates": list(rates), "losses": losses},
        **{"low": low, "high": high, "sensitivity": estimate(0.05 / METHODS[method], 0.2)},
        "largest_stable_rate": rates[-1] if METHODS[method] > 1.2 else rates[-2],
    }
