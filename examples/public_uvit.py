"""Make a run of a public U-ViT checkpoint, so that `scalelong sample` and `evaluate` take it.

python examples/public_uvit.py imagenet64_uvit_mid.pth imagenet64-uvit-m4 runs/public-m4
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from scalelong.config import Config, build_model, load_recipe
from scalelong.runs import Run
from scalelong.runs.run_dir import environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights", type=Path, help="the .pth file of the public code")
    parser.add_argument("recipe", help="the recipe of its network, for instance cifar10-uvit-s2")
    parser.add_argument("folder", type=Path, help="the folder of the run that is made")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    # The public networks have plain skips.
    config = load_recipe(given.recipe, ["scaling.method=none", *given.overrides])
    print(f"made: {make_run(given.weights, config, given.folder)}")


def make_run(weights: Path, config: Config, folder: Path) -> Path:
    """A finished run whose EMA weights are those of the file: the public code saves no others."""
    if config.text is not None:
        raise SystemExit("U-ViT's networks for text are fed times from 1 to 1000, ours from 0: see docs/paper.md")
    run, network = Run(folder), build_model(config)
    if run.exists:
        raise SystemExit(f"{folder} is a run already: choose another folder")
    network.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    run.begin(config, environment(device=torch.device("cpu"), processes=1, precision="fp16", seed=config.seed, step=0))
    tensors = network.state_dict()
    run.checkpoints().save(config.training.steps, {"model": tensors, "ema": tensors}, {"source": weights.name})
    return folder


if __name__ == "__main__":
    main()
