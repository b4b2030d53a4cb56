"""Tiny models of diffusers, one for each layout in which its long skips come."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .family import Family
from .oracle import Join

UP_BLOCK = Join(r"up_blocks\.\d+")


def image(channels: int = 3, size: int = 8) -> Tensor:
    return torch.randn(2, channels, size, size)


def sample_at(channels: int = 3, size: int = 8, **others: Tensor) -> dict[str, Any]:
    return {"sample": image(channels, size), "timestep": torch.tensor([3, 700]), **others}


def with_text(channels: int = 4, size: int = 8) -> dict[str, Any]:
    return sample_at(channels, size, encoder_hidden_states=torch.randn(2, 5, 8))


def unet_2d(down: list[str], up: list[str], **options: Any) -> nn.Module:
    from diffusers import UNet2DModel

    common = {
        "sample_size": 8,
        "block_out_channels": [16, 32],
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "attention_head_dim": 8,
    }
    return UNet2DModel(down_block_types=down, up_block_types=up, **{**common, **options})


def unet_condition(down: list[str], up: list[str], **options: Any) -> nn.Module:
    from diffusers import UNet2DConditionModel

    common = {
        "sample_size": 8,
        "block_out_channels": [16, 16, 32, 32][-len(down) :],
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "cross_attention_dim": 8,
        "attention_head_dim": 2,
    }
    return UNet2DConditionModel(down_block_types=down, up_block_types=up, **{**common, **options})


def stable_diffusion(**options: Any) -> nn.Module:
    """The layout of Stable Diffusion 1 and 2: four levels, two blocks each, attention but at the innermost."""
    down = [*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"]
    up = ["UpBlock2D", *["CrossAttnUpBlock2D"] * 3]
    return unet_condition(down, up, layers_per_block=2, **options)


def stable_diffusion_xl() -> nn.Module:
    return unet_condition(
        ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        layers_per_block=2,
        attention_head_dim=[2, 4, 4],
        transformer_layers_per_block=[1, 1, 2],
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=32,
    )


def text_and_sizes() -> dict[str, Any]:
    conditions = {"text_embeds": torch.randn(2, 8), "time_ids": torch.rand(2, 6)}
    return {**with_text(), "added_cond_kwargs": conditions}


def k_blocks() -> nn.Module:
    """The layout of the latent upscaler; the innermost up block gets no skip."""
    return unet_condition(
        ["KDownBlock2D", "KCrossAttnDownBlock2D", "KCrossAttnDownBlock2D"],
        ["KCrossAttnUpBlock2D", "KCrossAttnUpBlock2D", "KUpBlock2D"],
        block_out_channels=[32, 64, 64],
        layers_per_block=2,
        attention_head_dim=8,
        time_embedding_dim=64,
        mid_block_type=None,
        norm_num_groups=None,
        act_fn="gelu",
        conv_in_kernel=1,
        conv_out_kernel=1,
        resnet_time_scale_shift="scale_shift",
        time_embedding_type="fourier",
        timestep_post_act="gelu",
    )


def simple_cross_attention() -> nn.Module:
    return unet_condition(
        ["ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"],
        ["SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"],
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        resnet_time_scale_shift="scale_shift",
    )


def video_3d() -> nn.Module:
    from diffusers import UNet3DConditionModel

    return UNet3DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=8,
        attention_head_dim=8,
    )


def motion() -> nn.Module:
    from diffusers import UNetMotionModel

    return UNetMotionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
        up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion"),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=8,
        num_attention_heads=2,
        motion_num_attention_heads=2,
    )


def spatio_temporal() -> nn.Module:
    from diffusers import UNetSpatioTemporalConditionModel

    return UNetSpatioTemporalConditionModel(
        sample_size=8,
        in_channels=4,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=12,
        layers_per_block=1,
        cross_attention_dim=8,
        transformer_layers_per_block=1,
        num_attention_heads=(2, 4),
    )


def frames_first() -> dict[str, Any]:
    return {
        "sample": torch.randn(2, 2, 4, 8, 8),
        "timestep": torch.tensor([3, 700]),
        "encoder_hidden_states": torch.randn(2, 1, 8),
        "added_time_ids": torch.rand(2, 3),
    }


def frames_last() -> dict[str, Any]:
    return {**with_text(), "sample": torch.randn(2, 4, 2, 8, 8)}


def frames_last_text_per_frame() -> dict[str, Any]:
    return {**frames_last(), "encoder_hidden_states": torch.randn(4, 5, 8)}


def sequence_1d(**options: Any) -> nn.Module:
    from diffusers import UNet1DModel

    common = {"sample_size": 32, "in_channels": 2, "out_channels": 2, "layers_per_block": 1}
    return UNet1DModel(**{**common, **options})


def audio() -> nn.Module:
    """The layout of Dance Diffusion, where even the blocks named NoSkip take a skip."""
    return sequence_1d(block_out_channels=(16, 32, 32), extra_in_channels=32)


def planner() -> nn.Module:
    """The layout of the planners of reinforcement learning."""
    return sequence_1d(
        block_out_channels=(16, 32, 32),
        down_block_types=["DownResnetBlock1D"] * 3,
        up_block_types=["UpResnetBlock1D"] * 2,
        mid_block_type="MidResTemporalBlock1D",
        out_block_type="OutConv1DBlock",
        time_embedding_type="positional",
        use_timestep_embedding=True,
        freq_shift=1,
        act_fn="mish",
        downsample_each_block=False,
    )


def sequence_at() -> dict[str, Any]:
    return {"sample": torch.randn(2, 2, 32), "timestep": torch.tensor([3, 700])}


def hunyuan() -> nn.Module:
    from diffusers import HunyuanDiT2DModel

    return HunyuanDiT2DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        patch_size=2,
        sample_size=8,
        hidden_size=24,
        num_layers=8,
        mlp_ratio=2.0,
        cross_attention_dim=8,
        cross_attention_dim_t5=8,
        pooled_projection_dim=8,
        text_len=3,
        text_len_t5=4,
        use_style_cond_and_image_meta_size=False,
    )


def hunyuan_inputs() -> dict[str, Any]:
    angles = torch.rand(16, 12)
    return {
        "hidden_states": image(4),
        "timestep": torch.tensor([3.0, 700.0]),
        "encoder_hidden_states": torch.randn(2, 3, 8),
        "text_embedding_mask": torch.ones(2, 3),
        "encoder_hidden_states_t5": torch.randn(2, 4, 8),
        "text_embedding_mask_t5": torch.ones(2, 4),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }


def kandinsky() -> nn.Module:
    from diffusers import Kandinsky3UNet

    return Kandinsky3UNet(
        time_embedding_dim=16,
        groups=2,
        attention_head_dim=8,
        layers_per_block=2,
        block_out_channels=(16, 16, 32, 32),
        cross_attention_dim=8,
        encoder_hid_dim=8,
    )


def cascade(**options: Any) -> nn.Module:
    from diffusers import StableCascadeUNet

    layer = ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock")
    common = {
        "in_channels": 4,
        "out_channels": 4,
        "timestep_ratio_embedding_dim": 8,
        "conditioning_dim": 8,
        "block_out_channels": (8, 16, 16),
        "num_attention_heads": (2, 2, 2),
        "down_num_layers_per_block": (1, 1, 1),
        "up_num_layers_per_block": (1, 1, 2),
        "down_blocks_repeat_mappers": (1, 1, 1),
        "up_blocks_repeat_mappers": (1, 1, 1),
        "block_types_per_layer": (layer, layer, layer),
        "clip_text_pooled_in_channels": 8,
        "dropout": (0.0, 0.0, 0.0),
    }
    return StableCascadeUNet(**{**common, **options})


def cascade_inputs() -> dict[str, Any]:
    return {"sample": image(4), "timestep_ratio": torch.rand(2), "clip_text_pooled": torch.randn(2, 1, 8)}


PLAIN = (["DownBlock2D", "DownBlock2D"], ["UpBlock2D", "UpBlock2D"])
ATTENTION = (["DownBlock2D", "AttnDownBlock2D"], ["AttnUpBlock2D", "UpBlock2D"])
PROGRESSIVE = (["SkipDownBlock2D", "AttnSkipDownBlock2D"], ["AttnSkipUpBlock2D", "SkipUpBlock2D"])
RESNET = (["ResnetDownsampleBlock2D"] * 2, ["ResnetUpsampleBlock2D"] * 2)
TWO_LEVELS = (16, 16, 16, 32)
STABLE_DIFFUSION = (16, 16, 16, 16, 16, 16, 16, 32, 32, 32, 32, 32)


def _family(name: str, build: Any, inputs: Any, widths: tuple[int, ...], **options: Any) -> Family:
    declared = {"join": UP_BLOCK, "absorbed": True, "requires": "diffusers", **options}
    return Family(f"diffusers-{name}", build, inputs, widths, **declared)


DIFFUSERS = [
    _family("unet2d", lambda: unet_2d(*PLAIN), sample_at, TWO_LEVELS),
    _family("unet2d-attention", lambda: unet_2d(*ATTENTION), sample_at, TWO_LEVELS),
    _family(
        "unet2d-progressive",
        lambda: unet_2d(*PROGRESSIVE, block_out_channels=[32, 64]),  # these blocks insist on 32 groups
        sample_at,
        (32, 32, 32, 64),
    ),
    _family("unet2d-resnet-resampling", lambda: unet_2d(*RESNET), sample_at, TWO_LEVELS),
    _family("stable-diffusion-1", lambda: stable_diffusion(), with_text, STABLE_DIFFUSION),
    _family(
        "stable-diffusion-2",
        lambda: stable_diffusion(use_linear_projection=True, attention_head_dim=[2, 2, 4, 4]),
        with_text,
        STABLE_DIFFUSION,
        like="diffusers-stable-diffusion-1",
    ),
    _family("stable-diffusion-xl", stable_diffusion_xl, text_and_sizes, (16, 16, 16, 16, 32, 32, 32, 32, 32)),
    _family("k-blocks", k_blocks, with_text, (32, 64), fuses=False),
    _family("simple-cross-attention", simple_cross_attention, with_text, (32, 32, 32, 32)),
    _family("unet3d", video_3d, frames_last, TWO_LEVELS),
    _family("motion", motion, frames_last_text_per_frame, TWO_LEVELS),
    _family("spatio-temporal", spatio_temporal, frames_first, (32, 32, 32, 64)),
    _family("unet1d-audio", audio, sequence_at, (16, 32, 32), absorbed=False),
    _family("unet1d-planner", planner, sequence_at, (32, 32), absorbed=False),
    _family("hunyuan-dit", hunyuan, hunyuan_inputs, (16, 16, 16), join=Join(r"blocks\.\d+")),
    _family(
        "kandinsky3",
        kandinsky,
        lambda: {**with_text(4, 16), "encoder_attention_mask": torch.ones(2, 5)},
        (16, 16, 32),
        join=Join("", after="down_blocks.3"),
        fuses=False,
    ),
    _family("stable-cascade-c", cascade, cascade_inputs, (8, 16), join=Join(r"up_blocks\.\d+\.0"), absorbed=False),
    _family(
        "stable-cascade-b",  # repeats its up blocks, so that the same skip enters the same block several times
        lambda: cascade(up_blocks_repeat_mappers=(2, 3, 1), switch_level=(True, True)),
        cascade_inputs,
        (8, 16),
        join=Join(r"up_blocks\.\d+\.0"),
        absorbed=False,
    ),
]
