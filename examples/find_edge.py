"""Find the largest learning rate that a diffusers loop of your own survives, with and without scaled skips.

python examples/find_edge.py            # a minute on one core; with the name of a file it can be resumed: edge.json
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator

import torch
from diffusers import DDPMScheduler, UNet2DModel
from sklearn.datasets import load_digits

import scalelong

STEPS, BATCH = 40, 16
IMAGES = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1


def train(scale: Callable, lr: float, seed: int) -> Iterator[float]:
    """Thirty lines as in any diffusers script. New: `scale(model)`, and the loss is yielded."""
    torch.manual_seed(seed)
    model = UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        add_attention=False,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    scale(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scheduler = DDPMScheduler()
    for _ in range(STEPS):
        images = IMAGES[torch.randint(len(IMAGES), (BATCH,))]
        noise, times = torch.randn_like(images), torch.randint(1000, (BATCH,))
        predicted = model(scheduler.add_noise(images, noise, times), times).sample
        loss = (predicted - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    found = scalelong.find_edge(
        train,
        methods=["none", "cs:kappa=0.7:where=after-norm"],
        lrs=[1e-2, 2e-2, 4e-2],
        seeds=4,
        file=sys.argv[1] if len(sys.argv) > 1 else None,
    )
    print(found)
