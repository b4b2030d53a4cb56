"""A training loop in the shape of diffusers' train_unconditional.py, with scaled skips: what is new says so.

python examples/train_unconditional.py          # a minute on a CPU; writes runs/ddpm-digits, which any diffusers loads
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from scalelong import from_pretrained, save_pretrained, scale_skips  # new
from scalelong.monitor import SkipMonitor  # new

IMAGES = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1


def main(folder: Path, steps: int = 200) -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=1)
    model = UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        block_out_channels=(32, 64),
        layers_per_block=1,
        norm_num_groups=8,
        add_attention=False,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    scale_skips(model, "cs", kappa=0.7, where="after-norm")  # new: before the EMA, the optimiser and prepare
    ema = EMAModel(
        model.parameters(), decay=0.99, use_ema_warmup=True, model_cls=UNet2DModel, model_config=model.config
    )
    noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lr_scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=10, num_training_steps=steps)
    loader = DataLoader(TensorDataset(IMAGES), batch_size=32, shuffle=True, drop_last=True)
    model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)

    step = 0
    with SkipMonitor(model) as monitor:  # new
        while step < steps:
            for (images,) in loader:
                noise, times = torch.randn_like(images), torch.randint(0, 1000, (len(images),), device=images.device)
                with accelerator.accumulate(model):
                    predicted = model(noise_scheduler.add_noise(images, noise, times), times).sample
                    loss = F.mse_loss(predicted, noise)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    lr_scheduler.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    ema.step(model.parameters())
                    monitor.step(loss=loss)  # new
                    step += 1
                    if step == steps:
                        break
        print(f"step {step}, loss {loss.item():.4f}: {monitor.status}")  # new

    if not accelerator.is_main_process:
        return
    unet = accelerator.unwrap_model(model)
    # Not ema.save_pretrained(...), which would write a network without its scaling.
    ema.copy_to(unet.parameters())
    # To go on training: with its scaling, which plain diffusers refuses.
    save_pretrained(unet, folder / "scaled")  # new
    assert hasattr(from_pretrained(UNet2DModel, folder / "scaled"), "skip_scaling")
    # To sample anywhere: the constants folded into the weights, a plain pipeline.
    save_pretrained(unet, folder / "unet", fuse=True)  # new
    noise_scheduler.save_pretrained(folder / "scheduler")
    DDPMPipeline(UNet2DModel.from_pretrained(folder / "unet"), noise_scheduler).save_pretrained(folder)

    pipeline = DDPMPipeline.from_pretrained(folder)
    images = pipeline(batch_size=4, num_inference_steps=20, generator=torch.Generator().manual_seed(0)).images
    images[0].save(folder / "sample.png")
    print(f"sampled: {folder / 'sample.png'}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/ddpm-digits"))
