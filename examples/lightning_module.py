"""Lightning: the network is scaled where it is made, and the monitor is a callback.

pip install lightning
python examples/lightning_module.py          # half a minute on a CPU; writes runs/lightning
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from scalelong import from_pretrained, save_pretrained, scale_skips
from scalelong.monitor import SkipMonitor

IMAGES = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1


class Diffusion(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.unet = UNet2DModel(
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
        # Here, so that the optimiser, the strategy and a checkpoint of Lightning know it.
        scale_skips(self.unet, "ls")
        self.scheduler = DDPMScheduler()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        (images,) = batch
        noise, times = torch.randn_like(images), torch.randint(1000, (len(images),), device=self.device)
        return F.mse_loss(self.unet(self.scheduler.add_noise(images, noise, times), times).sample, noise)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Watch(lightning.Callback):
    """Reads the skips every ten steps of the optimiser, and says at the end what state the run is in."""

    def on_train_start(self, trainer: lightning.Trainer, module: Any) -> None:
        self.monitor = SkipMonitor(module.unet).start()

    def on_train_batch_end(self, trainer: lightning.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.monitor.step(loss=outputs["loss"])

    def on_train_end(self, trainer: lightning.Trainer, module: Any) -> None:
        self.monitor.stop()
        print(f"after {trainer.global_step} steps: {self.monitor.status}")


def main(folder: Path, steps: int = 100) -> None:
    torch.manual_seed(0)
    module, loader = Diffusion(), DataLoader(TensorDataset(IMAGES), batch_size=32, shuffle=True)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", callbacks=[Watch()], enable_checkpointing=False, **quiet
    )
    trainer.fit(module, loader)
    save_pretrained(module.unet, folder)
    shipped, unet = from_pretrained(UNet2DModel, folder), module.unet.eval()
    with torch.no_grad():
        same = shipped(IMAGES[:2], 500).sample.equal(unet(IMAGES[:2], 500).sample)
    print(f"written: {folder}; loaded again it computes the same: {same}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/lightning"))
