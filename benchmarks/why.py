"""How often `scalelong why` names the cause of a collapse that was planted.

python benchmarks/why.py --out runs/why-benchmark --runs 3 --json docs/results/why.json

Each run is a tiny U-ViT on handwritten digits with one fault; runs that do not collapse are left out, and the next seed
is taken. Counted is how often only changes of the planted kind save the run (named), how often that kind is the
narrowest of those that do (likely), and how often it is among them (found). Killed and started again it goes on.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from scalelong.compare.why import ask_why
from scalelong.config import load_recipe
from scalelong.guard.losses import TrainingDiverged
from scalelong.runs import Run, RunError
from scalelong.training import train
from scalelong.training.logger import Silent

NETWORKS = Path(__file__).with_name("why_networks.py").resolve()
TRIES = 6
"""Seeds for each run that is wanted."""

BASE = (
    *("scaling.method=none", "training.seat_belt=false", "training.monitor_every=null", "training.sample_every=null"),
    *("training.validate_every=null", "data.validation_count=16", "training.checkpoint_every=20"),
    *("training.keep_last=40", "training.batch_size=16", "training.log_every=5", "training.steps=160"),
)
OWN = (*BASE, "optim.lr=1e-2")
TINY = (*BASE, "model.embed_dim=16", "model.num_heads=2", "model.patch_size=4", "model.depth=4")

PLANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "rate": ("rate", (*TINY, "optim.lr=0.3", "optim.warmup_steps=100")),
    "beta2": ("optimiser", (*TINY, "optim.lr=0.16", "optim.warmup_steps=100", "optim.betas=[0.9,0.9999]")),
    "eps": ("optimiser", (*OWN, "optim.eps=1e-20")),
    "half precision": ("precision", (*OWN, "training.precision=bf16")),
    "poisoned batch": ("data", (*OWN, "training.steps=480")),
    "layer × 30": ("module", (*TINY, "optim.lr=1e-2")),
}
FAULTS = {"eps": "eps", "half precision": "half", "poisoned batch": "poison"}


def recipe_of(cause: str, settings: tuple[str, ...], data: Path, folder: Path) -> Path:
    """The recipe of a run, as a file: those of planted networks name their code."""
    config = load_recipe("digits-deep").model_dump(mode="json")
    if cause in FAULTS:
        own = {"fault": FAULTS[cause]}
        config["model"] = {"kind": "python", "factory": f"{NETWORKS}:build", "image_shape": [1, 8, 8], "options": own}
    if cause == "poisoned batch":
        config["data"]["source"] = str(with_white(data))
    file = folder / "recipe.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(config))
    return file


def with_white(folder: Path) -> Path:
    """The digits as files, with one white image among them."""
    import numpy
    from PIL import Image
    from sklearn.datasets import load_digits

    if not (folder / "done").is_file():
        (folder / "images").mkdir(parents=True, exist_ok=True)
        images = (load_digits().images * 15.9375).astype(numpy.uint8)
        images[1] = 255
        for number, image in enumerate(images):
            Image.fromarray(image).save(folder / "images" / f"{number:05d}.png")
        (folder / "done").write_text("")
    return folder / "images"


def make_run(cause: str, settings: tuple[str, ...], seed: int, folder: Path, data: Path) -> Path:
    """Train with the fault, unless it is there."""
    out = folder / "run"
    own = tuple(f"{text}" for text in settings if not (cause in FAULTS and text.startswith("model.")))
    config = load_recipe(recipe_of(cause, settings, data, folder), [*own, f"seed={seed}"])
    if (folder / "trained").is_file():
        return out
    with suppress(TrainingDiverged):  # A run that is given up has collapsed, which is what is wanted.
        if cause == "layer × 30" and not (folder / "planted").is_file():
            train(config.model_copy(update={"training": config.training.model_copy(update={"steps": 80})}), out)
            scale_layer(Run(out), f"in_blocks.{seed % 2}.")
            (folder / "planted").write_text("")
        train(config, out, display=Silent())
    (folder / "trained").write_text("")
    return out


def scale_layer(run: Run, block: str) -> None:
    """Multiply the weights of a block in the last checkpoint by 30, not their averages."""
    store = run.checkpoints(40)
    last = store.latest()
    assert last is not None
    groups = {group: last.tensors(group) for group in last.groups}
    for name, value in groups["model"].items():
        if name.startswith(block) and value.ndim == 2:
            value.mul_(30)
    store.save(last.step, groups, last.state(), last.metric)


def cases(cause: str, wanted: int, out: Path) -> Iterator[dict]:
    """So many runs that collapsed, with what `why` says of them."""
    group, settings = PLANTS[cause]
    name, found = "".join(letter if letter.isalnum() else "-" for letter in cause), 0
    for seed in range(TRIES * wanted):
        folder, began = out / f"{name}-{seed}", time.process_time()
        run = make_run(cause, settings, seed, folder, out / "white")
        answer = run / "why.json"
        if not answer.is_file():
            try:
                ended = ask_why(run, workers=1, after=100, allow_code=True)
            except RunError as error:
                print(f"{cause}, seed {seed}: left out: {str(error).rpartition('/')[2]}", flush=True)
                continue
            if ended.signal is not None:
                raise SystemExit(128 + ended.signal)
        content = json.loads(answer.read_bytes())
        groups = content["groups"]
        yield {
            "cause": cause,
            "group": group,
            "seed": seed,
            "verdict": content["verdict"],
            "groups": groups,
            "named": content["verdict"] == "named" and groups == [group],
            "likely": content["likely"] == group,
            "found": group in groups,
            "unchanged": f"{content['changes'][0]['saved']} of {content['changes'][0]['of']}",
            "sentence": content["sentence"],
            "seconds": round(time.process_time() - began, 1),
        }
        found += 1
        if found == wanted:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/why-benchmark"))
    parser.add_argument("--runs", type=int, default=6, help="of each cause")
    parser.add_argument("--causes", nargs="+", choices=PLANTS, default=list(PLANTS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: list[dict] = []
    rounds = [(wanted, cause) for wanted in range(1, options.runs + 1) for cause in options.causes]
    for wanted, cause in rounds:  # One of each first: stopped early, it has something of all.
        known = [row for row in found if row["cause"] != cause]
        rows = list(cases(cause, wanted, options.out.resolve()))
        found = known + rows
        if rows:
            print(f"{cause}: {rows[-1]['sentence']}", flush=True)
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print("| planted | runs | named | likely | found |\n| --- | --- | --- | --- | --- |")
    for cause in options.causes:
        rows = [row for row in found if row["cause"] == cause]
        counts = " | ".join(str(sum(row[key] for row in rows)) for key in ("named", "likely", "found"))
        print(f"| {cause} | {len(rows)} | {counts} |")


if __name__ == "__main__":
    main()
