"""Every model that the tests run on.

`FAMILIES` are those that a rule knows, `UNKNOWN` those that only tracing can find, `NOT_UNETS` those without any long
skip.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from . import standins_adm as adm
from . import standins_edm as edm
from . import standins_edm2 as edm2
from . import standins_kdiffusion as kdiffusion
from . import standins_lucidrains as lucidrains
from . import standins_smp as smp
from .family import Family, Inputs
from .oracle import Join
from .unknown import NOT_UNETS, UNKNOWN
from .zoo_diffusers import DIFFUSERS, image

__all__ = ["FAMILIES", "NOT_UNETS", "UNKNOWN", "Family"]


def steps() -> Tensor:
    return torch.tensor([0.5, 3.0])


def noisy(*others: Any) -> tuple[Any, ...]:
    return (image(), steps(), *others)


def uvit(**options: Any) -> nn.Module:
    from scalelong.models import UViT

    return UViT(8, 2, embed_dim=24, depth=6, num_heads=2, mlp_ratio=2.0, init_std=0.2, **options)


def theory() -> nn.Module:
    from scalelong.theory.unet import TheoryUNet

    return TheoryUNet(8, 4)


UVIT = Join(r"out_blocks\.\d+")
OURS = [
    Family("uvit", uvit, noisy, (17, 17, 17), UVIT),
    Family(
        "uvit-classes",
        lambda: uvit(num_classes=5, mlp_time_embed=True),
        lambda: noisy(torch.tensor([1, 4])),
        (18, 18, 18),
        UVIT,
    ),
    Family(
        "uvit-text",
        lambda: uvit(clip_dim=8, num_clip_token=3),
        lambda: noisy(None, torch.randn(2, 3, 8)),
        (20, 20, 20),
        UVIT,
    ),
    Family("uvit-skip-norm", lambda: uvit(skip_norm=True), noisy, (17, 17, 17), UVIT, absorbed=True),
    Family(
        "theory-unet",
        theory,
        lambda: (torch.randn(2, 8),),
        (8, 8, 8, 8),
        Join(r"decoders\.\d+", op="add", skip_at=0),
        fuses=False,
    ),
]


def monai_diffusion(spatial_dims: int, **options: Any) -> nn.Module:
    from monai.networks.nets.diffusion_model_unet import DiffusionModelUNet

    pytest.importorskip("einops")  # which monai does not install, but needs for attention
    return DiffusionModelUNet(
        spatial_dims=spatial_dims,
        in_channels=1,
        out_channels=1,
        num_res_blocks=1,
        channels=(8, 16),
        attention_levels=(False, True),
        norm_num_groups=4,
        num_head_channels=8,
        **options,
    )


def monai_basic() -> nn.Module:
    from monai.networks.nets.basic_unet import BasicUNet

    return BasicUNet(spatial_dims=2, in_channels=1, out_channels=1, features=(4, 8, 8, 16, 16, 4))


def volume(spatial_dims: int, **others: Tensor) -> Inputs:
    return {"x": torch.randn(2, 1, *[8] * spatial_dims), "timesteps": torch.tensor([3, 700]), **others}


def monai(name: str, build: Any, inputs: Any, like: str | None = None) -> Family:
    join = Join(r"up_blocks\.\d+")
    return Family(f"monai-{name}", build, inputs, (8, 8, 8, 16), join, absorbed=True, requires="monai", like=like)


TEXT = {"with_conditioning": True, "cross_attention_dim": 8}
MONAI = [
    monai("diffusion-2d", lambda: monai_diffusion(2), lambda: volume(2)),
    monai("diffusion-3d", lambda: monai_diffusion(3), lambda: volume(3)),
    monai("diffusion-2d-text", lambda: monai_diffusion(2, **TEXT), lambda: volume(2, context=torch.randn(2, 3, 8))),
    monai(
        "diffusion-3d-text",
        lambda: monai_diffusion(3, **TEXT),
        lambda: volume(3, context=torch.randn(2, 3, 8)),
        like="monai-diffusion-2d-text",
    ),
    monai("diffusion-resnet-resampling", lambda: monai_diffusion(2, resblock_updown=True), lambda: volume(2)),
    Family(
        "monai-basic-unet",
        monai_basic,
        lambda: (torch.randn(2, 1, 32, 32),),
        (4, 8, 8, 16),
        Join(r"upcat_\d", skip_at=0),
        requires="monai",
    ),
]


class DiffusionWrapper(nn.Module):
    """What latent-diffusion puts around its network, which is `diffusion_model`."""

    def __init__(self, diffusion_model: nn.Module) -> None:
        super().__init__()
        self.diffusion_model = diffusion_model

    def forward(self, x: Tensor, t: Tensor, context: Tensor) -> Tensor:
        return self.diffusion_model(x, t, context=context)


def context() -> Tensor:
    return torch.randn(2, 3, 8)


ADM = Join("", after="middle_block")
THREE_LEVELS = (16, 16, 16, 32, 32, 48)
ADM_STANDINS = [
    Family(
        "improved-diffusion",
        lambda: adm.UNetModel(channel_mult=(1, 2, 3), num_classes=5),
        lambda: {"x": image(), "timesteps": steps(), "y": torch.tensor([1, 4])},
        THREE_LEVELS,
        ADM,
        absorbed=True,
    ),
    Family(
        "guided-diffusion",
        lambda: adm.UNetModel(num_res_blocks=2, resblock_updown=True, use_scale_shift_norm=True),
        noisy,
        (16, 16, 16, 16, 32, 32),
        ADM,
        absorbed=True,
    ),
    Family(
        "latent-diffusion",
        lambda: adm.UNetModel(context_dim=8),
        lambda: {"x": image(), "timesteps": steps(), "context": context()},
        (16, 16, 16, 32),
        ADM,
        absorbed=True,
    ),
    Family(
        "latent-diffusion-wrapped",
        lambda: DiffusionWrapper(adm.UNetModel(context_dim=8)),
        lambda: noisy(context()),
        (16, 16, 16, 32),
        Join("diffusion_model", after="diffusion_model.middle_block"),
        absorbed=True,
    ),
]

LUCIDRAINS = Join("", after="mid_block2")
LUCIDRAINS_STANDINS = [
    Family(
        "lucidrains-unet", lambda: lucidrains.Unet(dim_mults=(1, 2, 3)), noisy, (16, 16, 16, 16, 16, 32, 32), LUCIDRAINS
    ),
    Family(
        "lucidrains-unet-self-condition", lambda: lucidrains.Unet(self_condition=True), noisy, (16,) * 5, LUCIDRAINS
    ),
    Family(
        "lucidrains-unet1d",
        lambda: lucidrains.Unet1D(dim_mults=(1, 2, 3)),
        lambda: (torch.randn(2, 3, 16), steps()),
        (16, 16, 16, 16, 16, 32, 32),
        LUCIDRAINS,
    ),
]

EDM = Join("", after="dec.2x2_in1")
EDM_OUTER = Join("", after="dec.4x4_in1")
SONG = (16, 16, 16, 16, 16, 32)
# Read by a norm that is conditional, or a class of its own.
normed = partial(Family, absorbed=True, fuses=False)
EDM_STANDINS = [
    normed("edm-song", edm.SongUNet, noisy, SONG, EDM),
    normed("edm-song-auxiliary", lambda: edm.SongUNet(encoder_type="residual", decoder_type="skip"), noisy, SONG, EDM),
    normed("edm-dhariwal", edm.DhariwalUNet, noisy, (16, 16, 16, 32), EDM_OUTER),
    normed(
        "edm-preconditioned",
        lambda: edm.EDMPrecond(edm.SongUNet()),
        noisy,
        SONG,
        Join("model", after="model.dec.2x2_in1"),
    ),
    Family("edm2", edm2.UNet, noisy, (16, 16, 16, 32), EDM_OUTER, fuses=False),
    Family(
        "edm2-preconditioned",
        edm2.Precond,
        noisy,
        (16, 16, 16, 32),
        Join("unet", after="unet.dec.4x4_in1"),
        fuses=False,
    ),
]

UP_BLOCKS = Join(r"u_net\.u_blocks\.\d")
OTHER_STANDINS = [
    normed("k-diffusion", kdiffusion.ImageDenoiserModelV1, noisy, (16, 16), UP_BLOCKS),
    normed(
        "k-diffusion-staged",  # trained in stages: the outermost level is not in use
        lambda: kdiffusion.ImageDenoiserModelV1(channels=(8, 16, 32), skip_stages=1),
        noisy,
        (16,),
        UP_BLOCKS,
    ),
    normed(
        "k-diffusion-wrapped",
        lambda: kdiffusion.Denoiser(kdiffusion.ImageDenoiserModelV1()),
        noisy,
        (16, 16),
        Join(r"inner_model\.u_net\.u_blocks\.\d"),
    ),
    Family("smp-unet", smp.Unet, lambda: (image(),), (8, 8), Join(r"decoder\.blocks\.\d")),
    Family(
        "smp-unet-attention",
        lambda: smp.Unet(decoder_attention_type="scse"),
        lambda: (image(),),
        (8, 8),
        Join(r"decoder\.blocks\.\d"),
        fuses=False,
    ),
]


FAMILIES: list[Family] = [
    *OURS,
    *DIFFUSERS,
    *MONAI,
    *ADM_STANDINS,
    *LUCIDRAINS_STANDINS,
    *EDM_STANDINS,
    *OTHER_STANDINS,
]
