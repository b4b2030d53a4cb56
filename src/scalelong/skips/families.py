"""The known families of models: one function for each says where its long skips are.

A family's function yields the fields of each `SkipSite` without its index, in the order in which the forward pass joins
the skips (innermost first), and nothing for a model of another family. It never imports the family's library. See
CONTRIBUTING.md to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from .site import Argument, Channels, forward_parameters, is_norm

Fields = dict[str, Any]
Rule = Callable[[Any], Iterator[Fields]]


def is_a(model: nn.Module, *class_names: str) -> bool:
    """Whether the model's class, or one it derives from, has one of these names."""
    return any(kind.__name__ in class_names for kind in type(model).__mro__)


def base(layer: Any) -> Any:
    """The layer itself, or the one that an adapter (LoRA) wraps."""
    return base(layer.base_layer) if hasattr(layer, "base_layer") else layer


def argument(module: nn.Module, name: str, item: int | None = None) -> Argument:
    """The entry for `name`, an argument of the module's forward, given by position or by keyword."""
    return Argument(position=forward_parameters(module).index(name), name=name, item=item)


def concatenated(module: Any, path: str, trunk: int, total: int, readers: tuple[str, ...], **fields: Any) -> Fields:
    """Fields of a skip that follows `trunk` channels in a concatenation of `total`, which enters the module at `path`.

    `readers` are the parts of the module that read the concatenation first; `fields` replace those worked out here.
    """
    joined = Channels(trunk, total)
    absorbed = any(is_norm(module.get_submodule(reader)) for reader in readers)
    paths = tuple(f"{path}.{reader}" for reader in readers)
    common = {"consumer": path, "entry": joined, "width": len(joined), "absorbed": absorbed, "readers": paths}
    return common | {"joined": joined} | fields


def concatenated_tokens(block: Any, path: str, trunk: int, total: int, reader: str, tokens: int) -> Fields:
    """Fields of a skip of tokens, argument `skip` of a block that concatenates it on the last dimension."""
    fields = {"entry": argument(block, "skip"), "width": tokens, "joined": Channels(trunk, total, dim=-1)}
    return concatenated(block, path, trunk, total, (reader,), **fields)


def uvit(model: Any) -> Iterator[Fields]:
    """U-ViT, ours and the public one: `skip` argument of an out-block, cat on the last dimension, then Linear.

    Ours may have a LayerNorm before it.
    """
    if not (is_a(model, "UViT") and hasattr(model, "in_blocks") and hasattr(model, "out_blocks")):
        return
    _, tokens, dim = model.pos_embed.shape
    # UniDiffuser's second version has one token more, with a position of its own.
    tokens += getattr(model, "pos_embed_token", model.pos_embed[:, :0]).shape[1]
    for i, block in enumerate(model.out_blocks):
        if block.skip_linear is not None:
            reader = "skip_linear" if getattr(block, "skip_norm", None) is None else "skip_norm"
            yield concatenated_tokens(block, f"out_blocks.{i}", dim, 2 * dim, reader, tokens)


def theory_unet(model: Any) -> Iterator[Fields]:
    """The UNet of Eq. 3, whose decoders add the skip."""
    if not is_a(model, "TheoryUNet"):
        return
    for i, block in reversed(list(enumerate(model.decoders))):
        yield {"consumer": f"decoders.{i}", "entry": argument(block, "skip"), "width": model.width}


def diffusers_unet(model: Any) -> Iterator[Fields]:
    """diffusers UNets: `res_hidden_states_tuple` of an up block, its last item first; K-blocks use only that one."""
    blocks = list(getattr(model, "up_blocks", ()))
    if not blocks or not all("res_hidden_states_tuple" in forward_parameters(block) for block in blocks):
        return
    if is_a(model, "UNet1DModel"):
        yield from (unet1d_site(block, f"up_blocks.{i}") for i, block in enumerate(blocks))
    else:
        deepest = getattr(model, "mid_block", None) or model.down_blocks[-1]
        yield from tuple_sites(blocks, "res_hidden_states_tuple", resnet_channels(deepest.resnets[-1]))


def monai_diffusion_unet(model: Any) -> Iterator[Fields]:
    """MONAI DiffusionModelUNet: the list `res_hidden_states_list` of an up block, its last item first."""
    if not is_a(model, "DiffusionModelUNet"):
        return
    yield from tuple_sites(list(model.up_blocks), "res_hidden_states_list", model.middle_block.resnet_2.out_channels)


def resnet_channels(resnet: Any) -> int:
    """What a resnet puts out: its last convolution's channels, since K-blocks end with fewer than `out_channels`."""
    # The blocks of a video model wrap a spatial one.
    return base(getattr(resnet, "spatial_res_block", resnet).conv2).out_channels


def tuple_sites(blocks: list[Any], name: str, trunk: int) -> Iterator[Fields]:
    """Sites of up blocks that pop one item of a tuple before each of their resnets."""
    for i, block in enumerate(blocks):
        uses_last_item_only = is_a(block, "KUpBlock2D", "KCrossAttnUpBlock2D")
        for j, resnet in enumerate(block.resnets):
            inner = getattr(resnet, "spatial_res_block", resnet)
            total = getattr(inner, "in_channels", None) or inner.channels
            if total > trunk and (j == 0 or not uses_last_item_only):
                below = f"resnets.{j}" if inner is resnet else f"resnets.{j}.spatial_res_block"
                readers = tuple(f"{below}.{reader}" for reader in resnet_readers(inner))
                entry = argument(block, name, item=-1 - j)
                yield concatenated(block, f"up_blocks.{i}", trunk, total, readers, entry=entry, absorbed=True)
            trunk = resnet_channels(resnet)


def resnet_readers(resnet: Any) -> tuple[str, ...]:
    """The norm and the shortcut that read the joined features of a residual block of diffusers, MONAI or ADM."""
    if getattr(resnet, "conv_shortcut", None) is not None:
        return ("norm1", "conv_shortcut")
    shortcut = getattr(resnet, "skip_connection", None)
    if shortcut is None or isinstance(shortcut, nn.Identity):
        return ()
    norm = "norm1" if hasattr(resnet, "norm1") else "in_layers.0"
    return (norm, "skip_connection.conv" if hasattr(shortcut, "conv") else "skip_connection")


def unet1d_site(block: Any, path: str) -> Fields:
    """UNet1DModel: one skip per up block, as wide as the trunk; convolutions read both."""
    first = block.resnets[0]
    conv, shortcut = ("conv_in.conv1d", "residual_conv") if hasattr(first, "conv_in") else ("conv_1", "conv_skip")
    total = base(first.get_submodule(conv)).in_channels
    in_order = [f"resnets.0.{name}" for name, _ in first.named_modules() if name in (conv, shortcut)]
    has_shortcut = not isinstance(getattr(first, shortcut, nn.Identity()), nn.Identity)
    readers, entry = tuple(in_order) if has_shortcut else (), argument(block, "res_hidden_states_tuple", item=-1)
    return concatenated(block, path, total // 2, total, readers, entry=entry)


def hunyuan_dit(model: Any) -> Iterator[Fields]:
    """HunyuanDiT2DModel: `skip` argument of the second half's blocks, LayerNorm over the concatenation, then Linear."""
    if not is_a(model, "HunyuanDiT2DModel"):
        return
    tokens = model.pos_embed.height * model.pos_embed.width
    for i, block in enumerate(model.blocks):
        if block.skip_linear is not None:
            mix = base(block.skip_linear)
            yield concatenated_tokens(block, f"blocks.{i}", mix.out_features, mix.in_features, "skip_norm", tokens) | {
                "varies": True
            }


def kandinsky3(model: Any) -> Iterator[Fields]:
    """Kandinsky3UNet: inline cat before every up block but the first; conditional GroupNorm and a shortcut read it."""
    if not is_a(model, "Kandinsky3UNet"):
        return
    trunk = 0
    for i, block in enumerate(model.up_blocks):
        if i > 0:
            first = block.resnets_in[0]
            grows = not isinstance(first.shortcut_up_sample, nn.Identity)
            shortcut = "resnets_in.0.shortcut_up_sample" if grows else "resnets_in.0.shortcut_projection"
            total = first.resnet_blocks[0].group_norm.norm.num_channels
            readers = ("resnets_in.0.resnet_blocks.0.group_norm", shortcut)
            yield concatenated(block, f"up_blocks.{i}", trunk, total, readers)
        trunk = base(block.resnets_out[-1].resnet_blocks[-1].projection).out_channels


def stable_cascade(model: Any) -> Iterator[Fields]:
    """StableCascadeUNet: `x_skip` argument of a level's first block; a Linear reads it, unnormalised."""
    if not is_a(model, "StableCascadeUNet"):
        return
    for i, level in enumerate(model.up_blocks):
        block = level[0]
        if not hasattr(block, "channelwise"):
            continue
        trunk, total = base(block.depthwise).out_channels, base(block.channelwise[0]).in_features
        if total > trunk:
            entry = argument(block, "x_skip")
            yield concatenated(block, f"up_blocks.{i}.0", trunk, total, ("channelwise.0",), entry=entry)


def adm(model: Any) -> Iterator[Fields]:
    """improved-, guided- and latent-diffusion UNetModel: inline cat before every output block."""
    if not all(hasattr(model, name) for name in ("input_blocks", "middle_block", "output_blocks")):
        return
    trunk = model.middle_block[-1].out_channels
    for i, block in enumerate(model.output_blocks):
        readers, path = resnet_readers(block[0]), f"output_blocks.{i}"
        # ComfyUI calls the layers of a block one by one and never the block, whose forward names no arguments.
        if forward_parameters(block)[0] == "args":
            yield concatenated(block[0], f"{path}.0", trunk, block[0].channels, readers, absorbed=True)
        else:
            readers = tuple(f"0.{reader}" for reader in readers)
            yield concatenated(block, path, trunk, block[0].channels, readers, absorbed=True)
        trunk = [layer.out_channels for layer in block if hasattr(layer, "in_layers")][-1]


def denoising_diffusion_pytorch(model: Any) -> Iterator[Fields]:
    """denoising-diffusion-pytorch Unet and Unet1D: inline cat before each resnet; convolutions read it first."""
    if not (is_a(model, "Unet", "Unet1D") and hasattr(model, "ups") and hasattr(model, "final_res_block")):
        return
    paths = [f"ups.{k}.{j}" for k in range(len(model.ups)) for j in (0, 1)] + ["final_res_block"]
    for path in paths:
        block = model.get_submodule(path)
        readers = () if isinstance(block.res_conv, nn.Identity) else ("block1.proj", "res_conv")
        conv = base(block.block1.proj)
        yield concatenated(block, path, conv.out_channels, conv.in_channels, readers)


def edm(model: Any) -> Iterator[Fields]:
    """EDM SongUNet and DhariwalUNet: inline cat before the `dec` blocks that expect more channels than there are."""
    if not is_a(model, "SongUNet", "DhariwalUNet"):
        return
    trunk = [block.out_channels for block in model.enc.values() if hasattr(block, "norm0")][-1]
    for name, block in model.dec.items():
        if not hasattr(block, "norm0"):
            continue
        if block.in_channels != trunk:
            readers = ("norm0", "skip") if block.skip is not None else ()
            yield concatenated(block, f"dec.{name}", trunk, block.in_channels, readers, absorbed=True)
        trunk = block.out_channels


def edm2(model: Any) -> Iterator[Fields]:
    """EDM2 UNet: inline magnitude-preserving cat before the `dec` blocks; SiLU and weight-normalised convs read it."""
    if not (is_a(model, "UNet") and hasattr(model, "concat_balance") and hasattr(model, "dec")):
        return
    trunk = list(model.enc.values())[-1].out_channels
    for name, block in model.dec.items():
        if "block" in name:
            yield concatenated(block, f"dec.{name}", trunk, block.conv_res0.weight.shape[1], ())
        trunk = block.out_channels


def k_diffusion(model: Any) -> Iterator[Fields]:
    """k-diffusion image_v1: `skip` argument of every UBlock in use but the first; AdaGN and a shortcut read it."""
    if not is_a(model, "ImageDenoiserModelV1"):
        return
    for k in range(1, len(model.u_net.d_blocks) - model.u_net.skip_stages):
        block = model.u_net.u_blocks[k]
        total = base(block[0].main[2]).in_channels
        readers = () if isinstance(block[0].skip, nn.Identity) else ("0.main.0", "0.skip")
        entry = argument(block, "skip")
        yield concatenated(block, f"u_net.u_blocks.{k}", total // 2, total, readers, entry=entry, absorbed=True)


def monai_basic_unet(model: Any) -> Iterator[Fields]:
    """MONAI BasicUNet: argument `x_e` of UpCat, which puts the skip first; a convolution reads it."""
    if not is_a(model, "BasicUNet"):
        return
    for level in (4, 3, 2, 1):
        encoder = model.conv_0 if level == 1 else model.get_submodule(f"down_{level - 1}.convs")
        block = model.get_submodule(f"upcat_{level}")
        width, entry = base(encoder.conv_1.conv).out_channels, argument(block, "x_e")
        yield concatenated(block, f"upcat_{level}", 0, width, ("convs.conv_0.conv",), entry=entry)


def segmentation_models_pytorch(model: Any) -> Iterator[Fields]:
    """segmentation-models-pytorch Unet: argument `skip_connection` of a decoder block; a convolution reads it."""
    if not (is_a(model, "Unet") and hasattr(model, "encoder") and hasattr(model, "decoder")):
        return
    trunk = model.encoder.out_channels[-1]
    for i, block in enumerate(model.decoder.blocks):
        total = base(block.conv1[0]).in_channels
        if total > trunk:
            plain = isinstance(getattr(block.attention1, "attention", None), nn.Identity)
            entry = argument(block, "skip_connection" if "skip_connection" in forward_parameters(block) else "skip")
            yield concatenated(block, f"decoder.blocks.{i}", trunk, total, ("conv1.0",) if plain else (), entry=entry)
        trunk = base(block.conv2[0]).out_channels


FAMILIES: dict[str, Rule] = {
    "UViT": uvit,
    "TheoryUNet (Eq. 3)": theory_unet,
    "diffusers UNet2DModel, UNet2DConditionModel, UNet3DConditionModel, UNetMotionModel, "
    "UNetSpatioTemporalConditionModel, UNet1DModel": diffusers_unet,
    "diffusers HunyuanDiT2DModel": hunyuan_dit,
    "diffusers Kandinsky3UNet": kandinsky3,
    "diffusers StableCascadeUNet": stable_cascade,
    "MONAI DiffusionModelUNet": monai_diffusion_unet,
    "MONAI BasicUNet": monai_basic_unet,
    "improved-, guided- and latent-diffusion UNetModel": adm,
    "denoising-diffusion-pytorch Unet, Unet1D": denoising_diffusion_pytorch,
    "EDM SongUNet, DhariwalUNet": edm,
    "EDM2 UNet": edm2,
    "k-diffusion ImageDenoiserModelV1": k_diffusion,
    "segmentation-models-pytorch Unet": segmentation_models_pytorch,
}
