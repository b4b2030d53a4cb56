"""See scaled skips at work on real networks: find them, scale them in one line, measure the effect, undo, fuse.

make tour            # or: python examples/tour.py
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from scalelong import AbsorbedScalingWarning, find_skips, fuse_skips, scale_skips, unscale_skips
from scalelong.models import preset
from scalelong.theory.unet import TheoryUNet

METHODS: list[tuple[str, dict[str, float]]] = [("none", {}), ("uniform", {}), ("cs", {"kappa": 0.7}), ("ls", {})]
console = Console()


def main() -> None:
    torch.manual_seed(0)
    model = preset("cifar10-uvit-s2").eval()
    console.print(f"\n[bold]1. UViT-S/2, {parameters(model):,} parameters: its long skips[/bold]")
    show_skips(model)
    console.print("\n[bold]2. What each method does to the untrained network[/bold] (the same weights and images)")
    show_effect(model)
    console.print("\n[bold]3. The UNet of the paper's Eq. 3, 12 skips: E‖output‖² / ‖input‖²[/bold]")
    show_growth()
    console.print("\n[bold]4. Undo is exact, and constants fold into the weights[/bold]")
    show_round_trip(model)
    console.print("\n[bold]5. A norm that reads the skip first cancels a constant: scalelong says so[/bold]")
    show_warning()
    console.print("\nNext: [cyan]scalelong inspect cifar10-unet --method cs --kappa 0.7[/cyan], and docs/models.md\n")


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def show_skips(model: nn.Module) -> None:
    table = Table("i", "enters", "as", "tokens", "κ = 0.7")
    for site in find_skips(model):
        table.add_row(
            str(site.index), site.consumer, str(site.entry), str(site.width), f"{0.7 ** (site.index - 1):.3f}"
        )
    console.print(table)


def show_effect(model: nn.Module) -> None:
    x, t = torch.randn(2, 3, 32, 32), torch.tensor([100.0, 800.0])
    table = Table("method", "added parameters", "output change per unit of input noise", "gradient norm, first block")
    plain = parameters(model)
    for method, options in METHODS:
        scale_skips(model, method, **options)
        sensitivity, gradient = sensitivity_of(lambda x: model(x, t), x), first_gradient(model, x, t)
        table.add_row(label(method, options), f"{parameters(model) - plain:,}", f"{sensitivity:.4f}", f"{gradient:.4f}")
    unscale_skips(model)
    console.print(table)


def label(method: str, options: dict[str, float]) -> str:
    return " ".join([method, *(f"{name}={value}" for name, value in options.items())])


@torch.no_grad()
def sensitivity_of(network: Callable[[Tensor], Tensor], x: Tensor, size: float = 1e-2) -> float:
    """‖f(x + δ) − f(x)‖ / ‖δ‖ for a small random δ (Theorem 3.4)."""
    noise = size * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    return ((network(x + noise) - network(x)).norm() / noise.norm()).item()


def first_gradient(model: nn.Module, x: Tensor, t: Tensor) -> float:
    target = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    weight = model.get_parameter("in_blocks.0.attn.qkv.weight")
    (gradient,) = torch.autograd.grad((model(x, t) - target).square().mean(), [weight])
    return gradient.norm().item()


def show_growth() -> None:
    table = Table("method", "mean over 20 networks of width 64")
    for method, options in METHODS[:3]:
        table.add_row(label(method, options), f"{sum(growth(seed, method, options) for seed in range(20)) / 20:.2e}")
    console.print(table)


@torch.no_grad()
def growth(seed: int, method: str, options: dict[str, float]) -> float:
    generator = torch.Generator().manual_seed(seed)
    model = scale_skips(TheoryUNet(64, 12, generator=generator), method, **options)
    x = torch.randn(16, 64, generator=generator)
    return (model(x).square().sum() / x.square().sum()).item()


@torch.no_grad()
def show_round_trip(model: nn.Module) -> None:
    x, t = torch.randn(1, 3, 32, 32), torch.tensor([500.0])
    plain = model(x, t)
    scaled = scale_skips(model, "cs", kappa=0.7)(x, t)
    undone = unscale_skips(model)(x, t)
    fused = fuse_skips(scale_skips(model, "cs", kappa=0.7))(x, t)
    console.print(f"undone equals plain to the bit: {torch.equal(undone, plain)}")
    console.print(
        f"fused differs from scaled by at most {(fused - scaled).abs().max():.1e}, and needs no scalelong to run"
    )


def show_warning() -> None:
    unet = preset("cifar10-unet")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AbsorbedScalingWarning)
        scale_skips(unet, "cs", kappa=0.7)
    console.print(f"[yellow]{caught[0].message}[/yellow]")


if __name__ == "__main__":
    main()
