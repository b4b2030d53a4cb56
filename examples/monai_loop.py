"""A MONAI loop with scaled skips: DiffusionModelUNet, its scheduler and its inferer.

pip install monai
python examples/monai_loop.py          # half a minute on a CPU; writes runs/monai
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from monai.inferers import DiffusionInferer
from monai.networks.nets import DiffusionModelUNet
from monai.networks.schedulers import DDPMScheduler
from sklearn.datasets import load_digits

from scalelong import from_pretrained, save_pretrained, scale_skips
from scalelong.monitor import SkipMonitor

IMAGES = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1

build = partial(
    DiffusionModelUNet,
    spatial_dims=2,
    in_channels=1,
    out_channels=1,
    channels=(16, 32),
    attention_levels=(False, False),
    num_res_blocks=1,
    norm_num_groups=8,
)


def main(folder: Path, steps: int = 100) -> None:
    torch.manual_seed(0)
    # Its norms would cancel a constant: it acts after them.
    model = scale_skips(build(), "cs", kappa=0.7, where="after-norm")
    scheduler = DDPMScheduler(num_train_timesteps=1000)
    inferer, optimizer = DiffusionInferer(scheduler), torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    with SkipMonitor(model) as monitor:
        for _ in range(steps):
            images = IMAGES[torch.randint(len(IMAGES), (32,))]
            noise, times = torch.randn_like(images), torch.randint(0, 1000, (32,))
            predicted = inferer(inputs=images, diffusion_model=model, noise=noise, timesteps=times)
            loss = F.mse_loss(predicted, noise)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
        print(f"loss {loss.item():.4f}: {monitor.status}")

    save_pretrained(model, folder / "scaled")  # to go on training
    save_pretrained(model, folder / "plain", fuse=True)  # for a DiffusionModelUNet without scalelong
    shipped, plain = from_pretrained(build, folder / "scaled"), from_pretrained(build, folder / "plain")
    scheduler.set_timesteps(num_inference_steps=20)
    noise = torch.randn(4, 1, 8, 8)
    samples = [sample(inferer, network, scheduler, noise) for network in (shipped, plain)]
    print(f"written: {folder}; the folded network samples the same to {(samples[0] - samples[1]).abs().max():.1e}")


@torch.no_grad()
def sample(inferer: DiffusionInferer, network: torch.nn.Module, scheduler: DDPMScheduler, noise: torch.Tensor):
    torch.manual_seed(1)
    return inferer.sample(input_noise=noise, diffusion_model=network.eval(), scheduler=scheduler, verbose=False)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/monai"))
