"""UNets that no rule knows, for discovery by tracing, and networks that are no UNets."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .family import Family
from .oracle import Join


def picture() -> tuple[Tensor]:
    return (torch.randn(2, 3, 16, 16),)


def conv_block(channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, out_channels, 3, padding=1), nn.GroupNorm(2, out_channels), nn.SiLU())


def halve(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 2)


def double(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="nearest")


class InlineCat(nn.Module):
    """Everything in one forward, as in the first UNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = conv_block(3, 8), conv_block(8, 16), conv_block(16, 24)
        self.bottom = conv_block(24, 24)
        self.up3, self.up2, self.up1 = conv_block(24 + 24, 16), conv_block(16 + 16, 8), conv_block(8 + 8, 8)
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.first(x)
        two = self.second(halve(one))
        three = self.third(halve(two))
        x = self.bottom(halve(three))
        x = self.up3(torch.cat([double(x), three], dim=1))
        x = self.up2(torch.cat([double(x), two], dim=1))
        x = self.up1(torch.cat([double(x), one], dim=1))
        return self.head(x)


class CatBlock(nn.Module):
    """A decoder block that takes the skip as its second argument."""

    def __init__(self, channels: int, skip_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = conv_block(channels + skip_channels, out_channels)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.conv(torch.cat([double(x), skip], dim=1))


class AddBlock(nn.Module):
    """A decoder block in the manner of LinkNet: upsample, project, add the skip, convolve."""

    def __init__(self, channels: int, skip_channels: int, out_channels: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(channels, skip_channels, 1)
        self.conv = conv_block(skip_channels, out_channels)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.conv(double(self.project(x)) + skip)


class BlockwiseDecoder(nn.Module):
    """Decoder blocks called as block(x, skip)."""

    def __init__(self, block: type[CatBlock] | type[AddBlock]) -> None:
        super().__init__()
        self.stages = nn.ModuleList([conv_block(3, 8), conv_block(8, 12), conv_block(12, 16)])
        self.core = conv_block(16, 16)
        self.rises = nn.ModuleList([block(16, 16, 12), block(12, 12, 8), block(8, 8, 8)])
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for stage in self.stages:
            x = stage(x)
            kept.append(x)
            x = halve(x)
        x = self.core(x)
        for rise in self.rises:
            x = rise(x, kept.pop())
        return self.head(x)


class ListDecoder(nn.Module):
    """One decoder module that is given all skips in a list, innermost last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([conv_block(12 + 12, 8), conv_block(8 + 8, 8)])

    def forward(self, x: Tensor, features: list[Tensor]) -> Tensor:
        for block, feature in zip(self.blocks, reversed(features), strict=True):
            x = block(torch.cat([double(x), feature], dim=1))
        return x


class ListOfSkips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner, self.core = conv_block(3, 8), conv_block(8, 12), conv_block(12, 12)
        self.decoder = ListDecoder()
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        outer = self.outer(x)
        inner = self.inner(halve(outer))
        return self.head(self.decoder(self.core(halve(inner)), [outer, inner]))


class Nested(nn.Module):
    """A level that contains the next one, in the manner of pix2pix: the skip is the level's own input."""

    def __init__(self, channels: int, inside: int, inner: Nested | None) -> None:
        super().__init__()
        self.down = conv_block(channels, inside)
        self.inner = inner
        self.up = conv_block(inside if inner is None else inside * 2, channels)

    def forward(self, x: Tensor) -> Tensor:
        deeper = self.down(halve(x))
        if self.inner is not None:
            deeper = self.inner(deeper)
        return torch.cat([x, double(self.up(deeper))], dim=1)


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_block(3, 8)
        self.levels = Nested(8, 12, Nested(12, 16, None))
        self.head = nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.levels(self.stem(x)))


class TokenBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.mix, self.feed = nn.LayerNorm(dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x).mean(1, keepdim=True))
        return x + F.gelu(self.feed(x))


class JoiningBlock(TokenBlock):
    """Joins the skip with a linear layer before the usual block."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.fuse = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        assert residual is not None
        return super().forward(self.fuse(torch.cat([x, residual], dim=-1)))


class Tokens(nn.Module):
    """A transformer with long skips; the prefix token is concatenated along the sequence, which is no skip."""

    def __init__(self, dim: int = 12) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, dim, 4, stride=4)
        self.prefix = nn.Parameter(torch.randn(1, 1, dim))
        self.early = nn.ModuleList(TokenBlock(dim) for _ in range(3))
        self.middle = TokenBlock(dim)
        self.late = nn.ModuleList(JoiningBlock(dim) for _ in range(3))
        self.head = nn.Linear(dim, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.prefix.expand(len(x), -1, -1), tokens], dim=1)
        kept = []
        for block in self.early:
            tokens = block(tokens)
            kept.append(tokens)
        tokens = self.middle(tokens)
        for block in self.late:
            tokens = block(tokens, residual=kept.pop())
        return self.head(tokens)


class SkipFirst(nn.Module):
    """Puts the skip in front of the trunk's channels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = conv_block(3, 8), conv_block(8, 12), conv_block(12, 20)
        self.d, self.e = conv_block(12 + 20, 16), conv_block(8 + 16, 8)
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(halve(a))
        x = self.d(torch.cat([b, double(self.c(halve(b)))], dim=1))
        return self.head(self.e(torch.cat([a, double(x)], dim=1)))


class Wrapper(nn.Module):
    """A preconditioner around a UNet."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = SkipFirst()

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x + self.unet(x / 2)


class Lateral(nn.Module):
    """Crops the outer skip, which unpadded convolutions left too large, and passes the inner one through a 1x1 conv."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Conv2d(3, 8, 3), conv_block(8, 16), conv_block(16, 16)
        self.lateral = nn.Conv2d(16, 4, 1)
        self.up2, self.up1 = conv_block(16 + 4, 8), conv_block(8 + 8, 8)
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.one(x)
        two = self.two(F.avg_pool2d(one, 3, stride=2))
        x = double(self.three(halve(two)))
        x = double(self.up2(torch.cat([x, self.lateral(two)], dim=1)))
        cropped = one[..., 1 : 1 + x.shape[-2], 1 : 1 + x.shape[-1]]
        return self.head(self.up1(torch.cat([x, cropped], dim=1)))


class InlineAdd(nn.Module):
    """Adds its skips between modules, so that no module is ever given one."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner, self.core = conv_block(3, 8), conv_block(8, 8), conv_block(8, 8)
        self.late, self.last, self.head = conv_block(8, 8), conv_block(8, 8), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        outer = self.outer(x)
        inner = self.inner(halve(outer))
        x = self.late(double(self.core(halve(inner))) + inner)
        return self.head(self.last(double(x) + outer))


class PlainTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(conv_block(channels, channels), nn.Conv2d(channels, channels, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def small_resnet() -> nn.Module:
    stages = [Residual(8), nn.AvgPool2d(2), Residual(8), nn.AvgPool2d(2), Residual(8)]
    return nn.Sequential(conv_block(3, 8), *stages, nn.Conv2d(8, 3, 1))


def small_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))


def muse() -> nn.Module:
    from diffusers import UVit2DModel

    return UVit2DModel(
        hidden_size=16,
        cond_embed_dim=8,
        micro_cond_encode_dim=4,
        micro_cond_embed_dim=20,
        encoder_hidden_size=8,
        vocab_size=12,
        codebook_size=8,
        in_channels=8,
        block_out_channels=8,
        num_res_blocks=1,
        block_num_heads=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        sample_size=4,
    )


def muse_inputs() -> dict[str, Tensor]:
    return {
        "input_ids": torch.randint(0, 8, (2, 4, 4)),
        "encoder_hidden_states": torch.randn(2, 3, 8),
        "pooled_text_emb": torch.randn(2, 8),
        "micro_conds": torch.rand(2, 5),
    }


UNKNOWN = [
    Family("inline-cat", InlineCat, picture, (8, 16, 24), Join("")),
    Family("cat-blocks", lambda: BlockwiseDecoder(CatBlock), picture, (8, 12, 16), Join(r"rises\.\d")),
    Family("list-of-skips", ListOfSkips, picture, (8, 12), Join("decoder")),
    Family("recursive", Recursive, picture, (8, 12), Join(r"levels(\.inner)?", skip_at=0)),
    Family("add-blocks", lambda: BlockwiseDecoder(AddBlock), picture, (8, 12, 16), Join(r"rises\.\d", op="add")),
    Family("tokens", Tokens, picture, (17, 17, 17), Join(r"late\.\d")),
    Family("wrapped-skip-first", Wrapper, picture, (8, 12), Join("unet", skip_at=0)),
    Family("lateral", Lateral, picture, (8, 4), Join("")),
    Family("inline-add", InlineAdd, picture, (8, 8), Join("", op="add")),
]
"""Their `widths` are those at the join: channels, or tokens for the transformer."""

NOT_UNETS = [
    Family("muse-uvit", muse, muse_inputs, requires="diffusers"),
    Family("transformer", PlainTransformer, lambda: (torch.randn(2, 5, 16),)),
    Family("mlp", small_mlp, lambda: (torch.randn(2, 8),)),
    Family("resnet", small_resnet, picture),
]
