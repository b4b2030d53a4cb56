"""A seat belt in a plain PyTorch loop: a rate far too high, and the run still ends well.

python examples/seat_belt.py            # half a minute on one core; another rate than 0.03 may be given
"""

from __future__ import annotations

import sys

import torch
from sklearn.datasets import load_digits

from scalelong import SeatBelt
from scalelong.diffusion import DiffusionProcess
from scalelong.models import UViT
from scalelong.training import EMA

STEPS, BATCH = 300, 16
IMAGES = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1


def train(rate: float, steps: int = STEPS) -> tuple[float, list[str]]:
    """The mean of the last twenty losses, and what the belt did."""
    torch.manual_seed(0)
    model = UViT(img_size=8, patch_size=2, in_chans=1, embed_dim=48, depth=8, num_heads=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
    process, ema, done, losses = DiffusionProcess(), EMA(model), [], []
    belt = SeatBelt(model, optimizer, ema, nothing=process.loss_of_nothing())
    for _ in range(steps):
        images = IMAGES[torch.randint(len(IMAGES), (BATCH,))]
        noise, times = torch.randn_like(images), torch.randint(1000, (BATCH,))
        loss = process.loss(model(process.add_noise(images, noise, times), times), images, noise, times).mean
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        ema.update(model)
        losses.append(loss.item())
        if event := belt.step(loss):
            print(event)
            done.append(str(event))
    return sum(losses[-20:]) / 20, done


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"loss at the end: {train(float(sys.argv[1]) if len(sys.argv) > 1 else 0.03)[0]:.3f}")
