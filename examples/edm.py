"""An EDM-style loop: preconditioning, log-normal noise levels, and an EMA that is a deep copy of the scaled network.

python examples/edm.py          # half a minute on a CPU; writes runs/edm
"""

from __future__ import annotations

import copy
import sys
from functools import partial
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from scalelong import from_pretrained, save_pretrained, scale_skips
from scalelong.monitor import SkipMonitor

sys.path.append(str(Path(__file__).parent / "own_network"))
from net import build  # noqa: E402 (a UNet of one's own; EDM's are taken alike)

IMAGES = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1
SIGMA_DATA = IMAGES.std().item()
BATCH, EMA_IMAGES = 32, 1000


class Precond(nn.Module):
    """D(x; σ) = c_skip·x + c_out·F(c_in·x; c_noise), as in Table 1 of EDM."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.model = network

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        total = sigma**2 + SIGMA_DATA**2
        c_skip, c_out, c_in = SIGMA_DATA**2 / total, sigma * SIGMA_DATA / total.sqrt(), 1 / total.sqrt()
        return c_skip * x + c_out * self.model(c_in * x, 250 * sigma.log().flatten())


def new_network() -> Precond:
    return Precond(build(width=16, depth=3))


def main(folder: Path, steps: int = 200) -> None:
    torch.manual_seed(0)
    net = new_network().train()
    # No family knows it, so one call is traced; the copy below is scaled as well, by a scaling of its own.
    scale_skips(net, "ls", example_inputs=(IMAGES[:2], torch.ones(2, 1, 1, 1)))
    ema = copy.deepcopy(net).eval().requires_grad_(False)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    with SkipMonitor(net, example_inputs=(IMAGES[:2], torch.ones(2, 1, 1, 1))) as monitor:
        for step in range(steps):
            images = IMAGES[torch.randint(len(IMAGES), (BATCH,))]
            sigma = (torch.randn(BATCH, 1, 1, 1) * 1.2 - 1.2).exp()
            weight = (sigma**2 + SIGMA_DATA**2) / (sigma * SIGMA_DATA) ** 2
            loss = (weight * (net(images + sigma * torch.randn_like(images), sigma) - images) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
            decay = 0.5 ** (BATCH / min(EMA_IMAGES, (step + 1) * BATCH * 0.05))
            with torch.no_grad():
                for kept, new in zip(ema.parameters(), net.parameters(), strict=True):
                    kept.lerp_(new, 1 - decay)
                for kept, new in zip(ema.buffers(), net.buffers(), strict=True):
                    kept.copy_(new)
        print(f"loss {loss.item():.4f}: {monitor.status}")

    save_pretrained(ema, folder)
    shipped, images = from_pretrained(partial(new_network), folder), IMAGES[:2]
    with torch.no_grad():
        same = shipped(images, torch.ones(2, 1, 1, 1)).equal(ema(images, torch.ones(2, 1, 1, 1)))
    print(f"written: {folder}; loaded again the EMA computes the same: {same}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/edm"))
