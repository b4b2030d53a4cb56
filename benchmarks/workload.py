"""What the trainer's benchmark runs: the networks, their recipes, and the loop that most people write.

As a program it is that loop: `python benchmarks/workload.py CASE BATCH THREADS` does a step for every line it reads,
and answers with the seconds that passed and that it computed.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from common import serve
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from scalelong.config import Config, build_model, build_process
from scalelong.data import load_images
from scalelong.diffusion import noise_predictor


@dataclass(frozen=True)
class Case:
    """One network at one batch size; `peak_goal` is the share of the matrix products' rate to reach."""

    batch: int
    peak_goal: float | None
    model: dict[str, Any]
    rounds: int


CASES = {
    "uvit-s2": Case(
        8,
        0.80,
        {"kind": "uvit", "img_size": 32, "patch_size": 2, "embed_dim": 512, "depth": 12, "num_heads": 8},
        rounds=12,
    ),
    "uvit-tiny": Case(
        64,
        0.60,
        {"kind": "uvit", "img_size": 32, "patch_size": 4, "embed_dim": 128, "depth": 8, "num_heads": 4},
        rounds=40,
    ),
    # The network of DDPM for CIFAR-10.
    "unet-36m": Case(
        4,
        None,
        {
            "kind": "unet",
            "sample_size": 32,
            "block_out_channels": (128, 256, 256, 256),
            "depth": 2,
            "attention": (16,),
            "norm_eps": 1e-6,
            "dropout": 0.1,
            "downsample_padding": 0,
            "flip_sin_to_cos": False,
            "freq_shift": 1,
        },
        rounds=12,
    ),
}


def recipe(case: Case, *, steps: int = 1_000_000, **training: Any) -> Config:
    """The case as a recipe, on scikit-learn's digits in colour and enlarged to the network's size."""
    size = case.model.get("img_size", case.model.get("sample_size"))
    return Config.model_validate(
        {
            "name": "benchmark",
            "data": {"source": "sklearn:digits", "image_size": size, "validation_count": 97},
            "model": case.model,
            "optim": {"lr": 1e-4, "clip_norm": 1.0, "ema_decay": 0.999},
            "training": {"steps": steps, "batch_size": case.batch, **training},
        }
    )


def plain_loop(config: Config) -> Callable[[], float]:
    """A step as most people write it, on the same network and images."""
    network = build_model(config)
    images = TensorDataset(load_images(config.data).train.images / 127.5 - 1)
    batches = endless(DataLoader(images, batch_size=config.training.batch_size, shuffle=True, drop_last=True))
    optimiser = torch.optim.AdamW(network.parameters(), lr=config.optim.lr, foreach=False, fused=False)
    averaged = copy.deepcopy(network)
    steps = config.diffusion.steps
    signal = build_process(config.diffusion).schedule.log_alpha_bar(torch.arange(steps)).exp().view(-1, 1, 1, 1)

    def step() -> float:
        (clean,) = next(batches)
        noise, times = torch.randn_like(clean), torch.randint(steps, (len(clean),))
        noisy = signal[times].sqrt() * clean + (1 - signal[times]).sqrt() * noise
        loss = nn.functional.mse_loss(noise_predictor(network)(noisy, times), noise)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), config.optim.clip_norm or float("inf"))
        optimiser.step()
        with torch.no_grad():
            for average, parameter in zip(averaged.parameters(), network.parameters(), strict=True):
                average.mul_(config.optim.ema_decay).add_(parameter, alpha=1 - config.optim.ema_decay)
        return loss.item()

    return step


def endless(loader: DataLoader[Any]) -> Iterator[list[Tensor]]:
    while True:
        yield from loader


def main() -> None:
    name, batch, threads = sys.argv[1], *map(int, sys.argv[2:])
    torch.set_num_threads(threads)
    serve(plain_loop(recipe(replace(CASES[name], batch=batch))))


if __name__ == "__main__":
    main()
