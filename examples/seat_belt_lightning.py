"""A seat belt as a callback of Lightning: twelve lines that any LightningModule can use.

python examples/seat_belt_lightning.py      # needs `pip install lightning`; half a minute on one core
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from scalelong import SeatBelt
from scalelong.diffusion import DiffusionProcess
from scalelong.models import UViT

IMAGES = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1


class Belt(lightning.Callback):
    """One call after each step of the optimiser, which gradient accumulation makes rarer than batches."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        precision: Any = trainer.precision_plugin
        self.belt = SeatBelt(module, trainer.optimizers[0], nothing=1.0, scaler=getattr(precision, "scaler", None))
        self.steps = trainer.global_step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
        if trainer.global_step > self.steps:
            self.steps = trainer.global_step
            event = self.belt.step(outputs["loss"].detach() * trainer.accumulate_grad_batches)
            if event is not None:
                lightning.pytorch.utilities.rank_zero_info(str(event))


class Denoiser(lightning.LightningModule):
    def __init__(self, rate: float = 2e-3) -> None:
        super().__init__()
        self.unet = UViT(img_size=8, patch_size=2, in_chans=1, embed_dim=48, depth=4, num_heads=4)
        self.process, self.rate = DiffusionProcess(), rate

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        (images,) = batch
        noise, times = torch.randn_like(images), torch.randint(1000, (len(images),), device=images.device)
        noisy = self.process.add_noise(images, noise, times)
        return self.process.loss(self.unet(noisy, times), images, noise, times).mean

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.rate)


def train(rate: float = 2e-3, steps: int = 200) -> SeatBelt:
    lightning.seed_everything(0)
    belt, loader = Belt(), DataLoader(TensorDataset(IMAGES), batch_size=16, shuffle=True)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_steps=steps, accelerator="auto", devices=1, callbacks=[belt], **quiet)
    trainer.fit(Denoiser(rate), loader)
    return belt.belt


if __name__ == "__main__":
    train()
