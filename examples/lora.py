"""LoRA fine-tuning of a text-to-image UNet whose skips are scaled without changing what it computes at the start.

python examples/lora.py          # half a minute on a CPU; writes runs/lora-unet, a plain folder of diffusers
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DConditionModel
from peft import LoraConfig
from sklearn.datasets import load_digits

from scalelong import save_pretrained, scale_skips  # new
from scalelong.monitor import SkipMonitor  # new

DIGITS = load_digits()
IMAGES = torch.tensor(DIGITS.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
# In place of a text encoder: a "caption" of two tokens for each digit.
CAPTIONS = torch.randn(10, 2, 16, generator=torch.Generator().manual_seed(0))[torch.tensor(DIGITS.target)]


def pretrained() -> UNet2DConditionModel:
    """In place of UNet2DConditionModel.from_pretrained("owner/name", subfolder="unet")."""
    return UNet2DConditionModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=16,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )


@torch.no_grad()
def output(unet: UNet2DConditionModel) -> torch.Tensor:
    return unet.eval()(IMAGES[:2], torch.tensor([3, 900]), CAPTIONS[:2]).sample


def main(folder: Path, steps: int = 60) -> None:
    torch.manual_seed(0)
    unet = pretrained()
    before = output(unet)
    unet.requires_grad_(False)
    # New: one trained κ for all skips; the weights that read them are divided by its powers, so nothing changes yet.
    scale_skips(unet, "learned-kappa", init=0.7, where="after-norm", preserve=True)
    print(f"scaling changed the output by at most {(output(unet) - before).abs().max():.1e}")
    unet.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
    unet.skip_scaling.requires_grad_(True)  # new: adding an adapter has frozen everything else
    trained = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    print(
        f"{sum(p.numel() for p in trained):,} of {sum(p.numel() for p in unet.parameters()):,} parameters are trained"
    )

    optimizer, scheduler = torch.optim.AdamW(trained, lr=1e-3), DDPMScheduler()
    unet.train()
    with SkipMonitor(unet) as monitor:  # new
        for _ in range(steps):
            rows = torch.randint(len(IMAGES), (32,))
            noise, times = torch.randn(32, 1, 8, 8), torch.randint(1000, (32,))
            predicted = unet(scheduler.add_noise(IMAGES[rows], noise, times), times, CAPTIONS[rows]).sample
            loss = F.mse_loss(predicted, noise)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss=loss)  # new
        kappa = unet.skip_scaling.kappa.item()
        print(f"loss {loss.item():.4f}, κ = {kappa:.4f}: {monitor.status}")

    tuned = output(unet)
    unet.fuse_lora()
    unet.unload_lora()
    save_pretrained(unet, folder, fuse=True)  # new: κ goes into the weights as well
    plain = UNet2DConditionModel.from_pretrained(folder)
    print(f"written: {folder}; plain diffusers differs from it by at most {(output(plain) - tuned).abs().max():.1e}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/lora-unet"))
