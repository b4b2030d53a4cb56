"""What a seat belt costs, per step and in memory, for U-ViTs of 10 and 44 million parameters.

python benchmarks/belt.py               # a minute or two on one core; prints the table of docs/seat-belt.md

Times are those that this process computed for, so that other processes matter little. The share is that of a step of
batch 4, so small that a snapshot weighs as much as it ever does.
"""

from __future__ import annotations

import time
from statistics import median

import torch

from scalelong import SeatBelt
from scalelong.diffusion import DiffusionProcess
from scalelong.guard.losses import WINDOW
from scalelong.models import UViT
from scalelong.training import EMA

SIZES = {"10M": {"embed_dim": 256, "depth": 12, "num_heads": 4}, "44M": {"embed_dim": 512, "depth": 12, "num_heads": 8}}
BATCH, STEPS = 4, 2 * WINDOW


def measure(**shape: int) -> tuple[int, float, float, float, float]:
    """Parameters; seconds of a step, of a call within a window and of one at its end; bytes of four snapshots."""
    model = UViT(img_size=32, patch_size=2, in_chans=3, **shape)
    optimizer, ema, process = torch.optim.AdamW(model.parameters(), lr=1e-4), EMA(model), DiffusionProcess()
    belt = SeatBelt(model, optimizer, ema, nothing=1.0)
    steps, within, ends = [], [], []
    for number in range(1, STEPS + 1):
        begun = time.process_time()
        images, noise, times = (
            torch.randn(BATCH, 3, 32, 32),
            torch.randn(BATCH, 3, 32, 32),
            torch.randint(1000, (BATCH,)),
        )
        loss = process.loss(model(process.add_noise(images, noise, times), times), images, noise, times).mean
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
        trained = time.process_time()
        belt.step(loss)
        ended = time.process_time()
        steps.append(trained - begun)
        (within if number % WINDOW else ends).append(ended - trained)
    size = 4 * belt.subject.bytes()
    return sum(weight.numel() for weight in model.parameters()), median(steps), median(within), median(ends), size


def main() -> None:
    torch.set_num_threads(1)
    print("| parameters | a step of 4 images | belt, 19 of 20 steps | belt, every 20th step | share | four snapshots |")
    print("| --- | --- | --- | --- | --- | --- |")
    for shape in SIZES.values():
        count, step, within, end, size = measure(**shape)
        share = ((WINDOW - 1) * within + end) / WINDOW / step
        times = f"{1e3 * step:.0f} ms | {1e6 * within:.0f} µs | {1e3 * end:.0f} ms"
        print(f"| {count:,} | {times} | {share:.2%} | {size / 2**30:.2f} GiB |", flush=True)


if __name__ == "__main__":
    main()
