"""Networks that are the user's own: a home-made one, and those of two libraries, as recipes name them."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NET = ROOT / "examples" / "own_network" / "net.py"

HOME_MADE = f"{NET}:build, options: {{width: 8, depth: 2}}"
# The class and attribute names of denoising-diffusion-pytorch, which does not import without torchvision.
LUCIDRAINS = "families.standins_lucidrains:Unet, options: {dim: 8, channels: 1}"
MONAI = (
    "monai.networks.nets:DiffusionModelUNet, options: {spatial_dims: 2, in_channels: 1, out_channels: 1, "
    "channels: [8, 16], attention_levels: [false, false], num_res_blocks: 1, norm_num_groups: 4}"
)
NETWORKS = {"home-made": HOME_MADE, "lucidrains": LUCIDRAINS, "monai": MONAI}


def model(factory: str = HOME_MADE, more: str = "") -> str:
    """The override of a recipe that gives it a network of one's own for digits."""
    return f"model={{kind: python, factory: {factory}, image_shape: [1, 8, 8]{more}}}"
