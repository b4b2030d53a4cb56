"""The networks that a recipe may name, each with its keys; the conditions they take come from other blocks."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from .sections import Fraction, Positive, Section, Whole, Wholes, require


class UViTConfig(Section):
    """`kind: uvit`, a `scalelong.models.UViT`."""

    kind: Literal["uvit"]
    img_size: Whole
    patch_size: Whole
    in_chans: Whole = 3
    embed_dim: Whole
    depth: Annotated[int, Field(ge=2, multiple_of=2)]
    """Blocks on both sides of the middle one; there are depth/2 long skips."""
    num_heads: Whole
    mlp_ratio: Positive = 4.0
    qkv_bias: bool = False
    init_std: Positive | None = None
    """null = 0.02·sqrt(512/embed_dim): small UViTs keep the paper's block gain."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of what the network denoises."""
        return self.in_chans, self.img_size, self.img_size

    @property
    def weight_std(self) -> float:
        """The standard deviation of the linear layers' weights at the start."""
        return 0.02 * math.sqrt(512 / self.embed_dim) if self.init_std is None else self.init_std

    @model_validator(mode="after")
    def _check(self) -> UViTConfig:
        require(self.img_size % self.patch_size == 0, "patch_size", f"must divide img_size ({self.img_size})")
        require(self.embed_dim % self.num_heads == 0, "num_heads", f"must divide embed_dim ({self.embed_dim})")
        return self


class UNetConfig(Section):
    """`kind: unet`, diffusers' `UNet2DModel`."""

    kind: Literal["unet"]
    sample_size: Whole
    in_channels: Whole = 3
    block_out_channels: Annotated[Wholes, Field(min_length=1)]
    """The width of each level, the finest first."""
    depth: Whole
    """Residual blocks per level (`layers_per_block`); there are levels·(depth + 1) long skips."""
    attention: Wholes = ()
    """The resolutions at which the network attends."""
    attention_head_dim: Whole | None = None
    """null = one head."""
    norm_num_groups: Whole = 32
    norm_eps: Positive = 1e-5
    dropout: Fraction = 0.0
    time_scale_shift: bool = False
    """Whether the time scales and shifts after a norm, as in improved-diffusion, or is added before it."""
    downsample_padding: Literal[0, 1] = 1
    """0 = strided convolutions are padded at the right and bottom only, as in DDPM."""
    flip_sin_to_cos: bool = True
    freq_shift: Annotated[int, Field(ge=0)] = 0

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of what the network denoises."""
        return self.in_channels, self.sample_size, self.sample_size

    @property
    def resolutions(self) -> tuple[int, ...]:
        """The resolution of each level, the finest first."""
        return tuple(self.sample_size >> level for level in range(len(self.block_out_channels)))

    @model_validator(mode="after")
    def _check(self) -> UNetConfig:
        halvings = 2 ** (len(self.block_out_channels) - 1)
        require(self.sample_size % halvings == 0, "sample_size", f"must be a multiple of {halvings} for so many levels")
        for width in self.block_out_channels:
            require(width % self.norm_num_groups == 0, "norm_num_groups", f"must divide every width, and not {width}")
        for side in self.attention:
            known = ", ".join(map(str, self.resolutions))
            require(
                side in self.resolutions, "attention", f"{side} is no resolution of this network; there are {known}"
            )
        return self


ModelConfig = Annotated[UViTConfig | UNetConfig, Field(discriminator="kind")]
