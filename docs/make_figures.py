"""Draw the figures of docs/models.md.

python docs/make_figures.py        # writes docs/figures/absorbed.png; about a minute
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import nn

from scalelong import AbsorbedScalingWarning, Channels, scale_skips, unscale_skips
from scalelong.models import preset
from scalelong.skips.readers import normalised_share

FIGURES = Path(__file__).parent / "figures"
KAPPAS = [10 ** (-exponent / 4) for exponent in range(1, 21)]
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#666666"


def main() -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    torch.manual_seed(0)
    warnings.simplefilter("ignore", AbsorbedScalingWarning)
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), constrained_layout=True)
    draw_shares(left)
    draw_outputs(right)
    FIGURES.mkdir(exist_ok=True)
    figure.savefig(FIGURES / "absorbed.png", dpi=150)


def draw_shares(axes: Any) -> None:
    """How much of a coefficient gets through three norms that read trunk and skip together."""
    half, straddling = nn.GroupNorm(32, 256, eps=1e-6), nn.GroupNorm(32, 384, eps=1e-6)
    curves = [
        ("Linear or convolution first (U-ViT)", GREEN, [1.0 for _ in KAPPAS]),
        ("LayerNorm over both (HunyuanDiT)", GREY, shares(nn.LayerNorm(256), Channels(128, 256))),
        ("GroupNorm, a group on the boundary", BLUE, shares(straddling, Channels(256, 384))),
        ("GroupNorm, groups inside the skip", ORANGE, shares(half, Channels(128, 256))),
    ]
    for label, colour, values in curves:
        axes.semilogx(KAPPAS, values, color=colour, label=label, linewidth=2)
    axes.set(title="What survives the first layer", xlabel="coefficient κ of the skip", ylabel="share that survives")
    axes.set_ylim(-0.03, 1.6)
    axes.invert_xaxis()
    axes.annotate("the norm's eps\ntakes over", (1.5e-4, 0.5), ha="left", color=ORANGE, fontsize=9)
    axes.legend(frameon=False, fontsize=8.5, loc="upper left")


def shares(norm: nn.Module, joined: Channels) -> list[float]:
    return [normalised_share(norm, joined, kappa) for kappa in KAPPAS]


@torch.no_grad()
def draw_outputs(axes: Any) -> None:
    """How far a real network's output moves when every skip is multiplied by κ, before the norm and after it."""
    model = preset("cifar10-unet").eval()
    x, t = torch.randn(2, 3, 32, 32), torch.tensor([100, 800])
    plain = model(x, t).sample
    kappas = [0.9, 0.7, 0.5, 0.3, 0.1, 0.03]
    for where, colour in (("input", ORANGE), ("after-norm", GREEN)):
        moved = []
        for kappa in kappas:
            scale_skips(model, "uniform", value=kappa, where=where)
            moved.append(((model(x, t).sample - plain).norm() / plain.norm()).item())
        axes.plot(kappas, moved, "o-", color=colour, label=f'where="{where}"', linewidth=2, markersize=4)
    unscale_skips(model)
    axes.set(title="Output of the 36M CIFAR-10 UNet", xlabel="κ of every skip", ylabel="relative change of the output")
    axes.set_ylim(bottom=0)
    axes.invert_xaxis()
    axes.legend(frameon=False)


if __name__ == "__main__":
    main()
