"""A seat belt in a loop of Hugging Face Accelerate, with gradient accumulation.

accelerate launch examples/seat_belt_accelerate.py      # or python; half a minute on one core
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from scalelong import SeatBelt
from scalelong.diffusion import DiffusionProcess
from scalelong.models import UViT

IMAGES = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1


def train(rate: float = 2e-3, updates: int = 200) -> SeatBelt:
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    network: nn.Module = UViT(img_size=8, patch_size=2, in_chans=1, embed_dim=48, depth=4, num_heads=4)
    loader = DataLoader(TensorDataset(IMAGES), batch_size=8, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(network, torch.optim.AdamW(network.parameters(), lr=rate), loader)
    process, mean = DiffusionProcess(), []
    # After `prepare`, with what it returned: Accelerate's optimiser is seen through, and so is DDP.
    belt = SeatBelt(model, optimizer, nothing=process.loss_of_nothing(), scaler=accelerator.scaler)
    while belt.count < updates:
        for (images,) in loader:
            with accelerator.accumulate(model):
                noise, times = torch.randn_like(images), torch.randint(1000, (len(images),), device=images.device)
                loss = process.loss(model(process.add_noise(images, noise, times), times), images, noise, times).mean
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                mean.append(loss.detach())
            if accelerator.sync_gradients:  # Once per step of the optimiser.
                event = belt.step(torch.stack(mean).mean())
                mean.clear()
                if event is not None:
                    accelerator.print(event)
            if belt.count == updates:
                break
    return belt


if __name__ == "__main__":
    train()
