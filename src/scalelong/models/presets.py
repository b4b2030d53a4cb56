"""The networks of the paper's settings, as a table.

`parameters` and `num_skips` are what the built model has exactly; the tests count both.
"""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .uvit import UViT


@dataclass(frozen=True)
class Preset:
    """One row of the table. `builder()` makes the model; keywords given to it replace the row's own."""

    name: str
    parameters: int
    num_skips: int
    builder: partial[Any]


def preset(name: str, **overrides: Any) -> nn.Module:
    """Build the model of a row; overrides go to the constructor of UViT or of diffusers' UNet2DModel.

    >>> model = preset("cifar10-uvit-s2", depth=4, embed_dim=64)
    >>> len(model.out_blocks)
    2
    """
    return find_preset(name).builder(**overrides)


def preset_names() -> list[str]:
    return list(_BY_NAME)


def find_preset(name: str) -> Preset:
    """The row of that name, without building its model."""
    if name not in _BY_NAME:
        closest = difflib.get_close_matches(name, _BY_NAME, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown preset {name!r}: did you mean {closest!r}? Known presets: {', '.join(_BY_NAME)}.")
    return _BY_NAME[name]


def example_inputs(row: str | Preset, batch: int = 1) -> dict[str, Tensor]:
    """Keyword arguments for the forward of a preset's model: fixed noise at t = 500, and its conditions.

    >>> {name: tuple(value.shape) for name, value in example_inputs("imagenet64-uvit-m4", batch=2).items()}
    {'x': (2, 3, 64, 64), 'timesteps': (2,), 'y': (2,)}
    """
    builder = (row if isinstance(row, Preset) else find_preset(row)).builder
    options, times = builder.keywords, torch.full((batch,), 500.0)
    if builder.func is not UViT:
        size = options["sample_size"]
        inputs = {"sample": _noise(batch, options.get("in_channels", 3), size, size), "timestep": times}
        classes = options.get("num_class_embeds")
        return inputs if classes is None else inputs | {"class_labels": torch.arange(batch) % classes}
    size = options["img_size"]
    inputs = {"x": _noise(batch, options.get("in_chans", 3), size, size), "timesteps": times}
    if options.get("num_classes", -1) > 0:
        inputs["y"] = torch.arange(batch) % options["num_classes"]
    if "clip_dim" in options:
        inputs["context"] = _noise(batch, options["num_clip_token"], options["clip_dim"])
    return inputs


def _noise(*shape: int) -> Tensor:
    # A generator of our own: asking for examples must not move the caller's random state.
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def build_unet(**config: Any) -> nn.Module:
    """diffusers' UNet2DModel, imported only when one is wanted."""
    return _diffusers_class("unet_2d", "UNet2DModel")(**config)


def build_text_unet(**config: Any) -> nn.Module:
    """diffusers' UNet2DConditionModel, which takes text by cross-attention."""
    return _diffusers_class("unet_2d_condition", "UNet2DConditionModel")(**config)


def _diffusers_class(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(f"diffusers.models.unets.{module}"), name)
    except ImportError as error:
        raise ImportError(
            'the UNet presets are built from diffusers, which could not be imported: pip install "scalelong[train]"'
        ) from error


def _unet(size: int, channels: tuple[int, ...], *, attention: tuple[int, ...], **options: Any) -> partial[nn.Module]:
    """A UNet2DModel with one level per entry of `channels`, attending at the resolutions in `attention`."""
    attends = ["Attn" if size >> level in attention else "" for level in range(len(channels))]
    return partial(
        build_unet,
        sample_size=size,
        block_out_channels=channels,
        down_block_types=tuple(f"{kind}DownBlock2D" for kind in attends),
        up_block_types=tuple(f"{kind}UpBlock2D" for kind in reversed(attends)),
        **options,
    )


_uvit_s = partial(UViT, embed_dim=512, depth=12, num_heads=8)
_imagenet_uvit = partial(UViT, img_size=64, patch_size=4, num_classes=1000)
_text_uvit = partial(_uvit_s, img_size=32, patch_size=2, in_chans=4, clip_dim=768, num_clip_token=77)

# DDPM and DDIM: one attention head, sines before cosines, strided convolutions padded at the right and bottom only.
_ddpm = partial(
    _unet,
    layers_per_block=2,
    attention=(16,),
    attention_head_dim=None,
    downsample_padding=0,
    flip_sin_to_cos=False,
    freq_shift=1,
    norm_eps=1e-6,
    dropout=0.1,
)

# improved-diffusion: time enters as a scale and a shift after the norm, and the output holds the mean and the learned
# variance. diffusers drops the norm before the middle attention under scale_shift; attn_norm_num_groups puts it back.
_improved = partial(
    _unet,
    layers_per_block=3,
    attention=(16, 8),
    out_channels=6,
    resnet_time_scale_shift="scale_shift",
    attn_norm_num_groups=32,
)

PRESETS = (
    # U-ViT-S/2 for CIFAR-10, unconditional.
    Preset("cifar10-uvit-s2", 44_255_328, 6, partial(_uvit_s, img_size=32, patch_size=2)),
    # U-ViT-S/4 for CelebA at 64×64, unconditional.
    Preset("celeba64-uvit-s4", 44_292_228, 6, partial(_uvit_s, img_size=64, patch_size=4)),
    # U-ViT-M/4 for ImageNet at 64×64, class-conditional.
    Preset("imagenet64-uvit-m4", 130_940_292, 8, partial(_imagenet_uvit, embed_dim=768, depth=16, num_heads=12)),
    # U-ViT-L/4 for ImageNet at 64×64, class-conditional.
    Preset("imagenet64-uvit-l4", 286_827_652, 10, partial(_imagenet_uvit, embed_dim=1024, depth=20, num_heads=16)),
    # U-ViT-S/2 for MS-COCO, text to image, on latents of 4×32×32.
    Preset("coco-uvit-s2", 44_692_644, 6, _text_uvit),
    # The same with 16 blocks.
    Preset("coco-uvit-s2-deep", 58_345_636, 8, partial(_text_uvit, depth=16)),
    # DDPM's UNet for CIFAR-10, unconditional.
    Preset("cifar10-unet", 35_746_307, 12, _ddpm(32, (128, 256, 256, 256))),
    # DDIM's UNet for CelebA at 64×64, unconditional.
    Preset("celeba64-unet", 78_700_803, 15, _ddpm(64, (128, 256, 256, 256, 512))),
    # improved-diffusion's UNet for CIFAR-10, unconditional, learned variance. 4 heads everywhere, as in the original:
    # all attending levels are 256 wide.
    Preset(
        "improved-cifar10-unet", 52_546_438, 16, _improved(32, (128, 256, 256, 256), attention_head_dim=64, dropout=0.3)
    ),
    # improved-diffusion's UNet for ImageNet at 64×64, class-conditional, learned variance. Original: 4 heads
    # everywhere; here: 4 at 8×8 and in the middle (768 wide) but 3 at 16×16 (576 wide), because UNet2DModel fixes the
    # width of a head instead of their number. The parameters are the same.
    Preset(
        "improved-imagenet64-unet",
        273_049_350,
        16,
        _improved(64, (192, 384, 576, 768), attention_head_dim=192, num_class_embeds=1000),
    ),
)

_BY_NAME = {row.name: row for row in PRESETS}
