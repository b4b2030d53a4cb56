"""The `Unet` of denoising-diffusion-pytorch with scaled skips, in a loop of one's own.

pip install denoising-diffusion-pytorch          # brings torchvision
python examples/lucidrains.py                    # half a minute on a CPU; writes runs/lucidrains
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from denoising_diffusion_pytorch import Unet
from diffusers import DDPMScheduler
from sklearn.datasets import load_digits

from scalelong import find_skips, from_pretrained, save_pretrained, scale_skips
from scalelong.monitor import SkipMonitor

IMAGES = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1

build = partial(Unet, dim=16, dim_mults=(1, 2), channels=1)


def main(folder: Path, steps: int = 100) -> None:
    torch.manual_seed(0)
    # Also where it is inside of a GaussianDiffusion: scale_skips(diffusion, ...) finds it there.
    model = scale_skips(build(), "cs", kappa=0.7)
    print(f"{len(find_skips(model))} skips: {[site.consumer for site in find_skips(model)]}")
    optimizer, scheduler = torch.optim.AdamW(model.parameters(), lr=1e-3), DDPMScheduler()
    with SkipMonitor(model) as monitor:
        for _ in range(steps):
            images = IMAGES[torch.randint(len(IMAGES), (32,))]
            noise, times = torch.randn_like(images), torch.randint(1000, (32,))
            loss = F.mse_loss(model(scheduler.add_noise(images, noise, times), times), noise)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss=loss)
        print(f"loss {loss.item():.4f}: {monitor.status}")

    save_pretrained(model, folder)  # with its scaling; fuse=True for weights that a plain Unet loads
    shipped, model = from_pretrained(build, folder), model.eval()
    with torch.no_grad():
        same = shipped(IMAGES[:2], torch.tensor([3, 900])).equal(model(IMAGES[:2], torch.tensor([3, 900])))
    print(f"written: {folder}; loaded again it computes the same: {same}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/lucidrains"))
