"""Small networks that join features in all the ways that tracing must tell apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .unknown import conv_block, double, halve


class UNet(nn.Module):
    """Two levels; `join` brings trunk and skip together, by a plain concatenation unless it is overridden."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = conv_block(3, 8), conv_block(8, 8), conv_block(8, 8)
        self.d, self.e, self.head = conv_block(16, 8), conv_block(16, 8), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(halve(a))
        x = self.d(self.join(double(self.c(halve(b))), b))
        return self.head(self.e(self.join(double(x), a)))

    def join(self, x: Tensor, skip: Tensor) -> Tensor:
        return torch.cat([x, skip], dim=1)


class Concat(nn.Module):
    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return torch.cat([x, skip], dim=1)


class SharedConcat(UNet):
    """One module without weights joins all skips, and a constant factor follows."""

    def __init__(self) -> None:
        super().__init__()
        self.concat = Concat()

    def join(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.concat(x, skip) * 0.5


class Gated(UNet):
    """An attention gate: trunk and skip decide together how much of the skip passes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Conv2d(8, 1, 1)

    def join(self, x: Tensor, skip: Tensor) -> Tensor:
        return torch.hstack([x, skip * torch.sigmoid(self.gate(x + skip))])


class Preallocated(UNet):
    """Copies the trunk piece by piece into a new tensor before the join."""

    def join(self, x: Tensor, skip: Tensor) -> Tensor:
        copy = torch.empty(x.shape)
        copy[:, :4] = x[:, :4]
        copy[:, 4:] = x[:, 4:]
        return torch.concat([copy, skip], dim=-3)


class Embedded(UNet):
    """Also concatenates a map of the time to the input of every block: a condition, not a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = conv_block(4, 8), conv_block(9, 8), conv_block(9, 8)
        self.d, self.e = conv_block(17, 8), conv_block(17, 8)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:  # type: ignore[override]
        def timed(x: Tensor) -> Tensor:
            return torch.cat([x, t[:, None, None, None].expand(-1, 1, *x.shape[2:])], dim=1)

        a = self.a(timed(x))
        b = self.b(timed(halve(a)))
        x = self.d(torch.cat([double(self.c(timed(halve(b)))), b, timed(b)[:, 8:]], dim=1))
        return self.head(self.e(torch.cat([double(x), a, timed(a)[:, 8:]], dim=1)))


class Pooled(nn.Module):
    """A branching block such as ASPP: it concatenates, but leads past nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far, self.mix = conv_block(8, 4), conv_block(8, 4), conv_block(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        far = F.interpolate(self.far(F.adaptive_avg_pool2d(x, 1)), size=x.shape[2:])
        return self.mix(torch.cat([self.near(x), far], dim=1))


class Branching(UNet):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Sequential(conv_block(8, 8), Pooled(), Pooled())


class UNetOfUNets(UNet):
    """Every block is itself a small UNet with as many skips."""

    def __init__(self) -> None:
        super().__init__()
        self.a[0], self.d[0], self.e[0] = UNet(), nn.Conv2d(16, 8, 1), nn.Conv2d(16, 8, 1)
        self.a[1] = nn.Conv2d(3, 8, 1)


class Projecting(nn.Module):
    """Fits the skip to the trunk inside, and adds it."""

    def __init__(self) -> None:
        super().__init__()
        self.fit, self.conv = nn.Conv2d(8, 8, 1), conv_block(8, 8)

    def forward(self, x: Tensor, *, shortcut: Tensor) -> Tensor:
        return self.conv(x + self.fit(shortcut))


class KeywordAdds(UNet):
    def __init__(self) -> None:
        super().__init__()
        self.d, self.e = Projecting(), Projecting()

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(halve(a))
        y = self.d(double(self.c(halve(b))), shortcut=b)
        return x + self.head(self.e(double(y), shortcut=a))


class Pix2Pix(nn.Module):
    """A block that holds the next one; its activation works in place on the skip, which is its own input."""

    def __init__(self, inner: nn.Module | None) -> None:
        super().__init__()
        down = [nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(8, 8, 4, stride=2, padding=1)]
        up = [nn.ReLU(inplace=True), nn.ConvTranspose2d(8 if inner is None else 16, 8, 4, stride=2, padding=1)]
        self.model = nn.Sequential(*down, *([] if inner is None else [inner]), *up)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.model(x)], dim=1)


class Repeating(UNet):
    """Runs its last block twice with the same skip, as Stable Cascade does."""

    def __init__(self) -> None:
        super().__init__()
        self.d, self.e = JoinBlock(), JoinBlock()

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(halve(a))
        x = double(self.d(double(self.c(halve(b))), b))
        return self.head(self.e(self.e(x, a), a))


class JoinBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv, self.short = nn.GroupNorm(4, 16), nn.Conv2d(16, 8, 1), nn.Conv2d(16, 8, 1)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = torch.cat([x, skip], dim=1)
        return self.short(x) + self.conv(self.norm(x))


class Dense(nn.Module):
    """A dense block that keeps all its features in a list."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(conv_block(8 * (i + 1), 8) for i in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, dim=1)))
        return features[-1]


class Growing(nn.Module):
    """A dense layer that passes on its input beside its output."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = conv_block(channels, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(x)], dim=1)


class Residual(nn.Module):
    """A residual block with another residual sum inside, around squeeze and excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.squeeze, self.last = conv_block(8, 8), nn.Conv2d(8, 8, 1), conv_block(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y = y + y * torch.sigmoid(self.squeeze(y.mean((2, 3), keepdim=True)))
        return x + self.last(y)


class TwoAtOnce(UNet):
    """Joins two features of the same level in one concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.e = conv_block(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(a)
        return self.head(self.e(torch.cat([double(self.c(halve(b))), b, a], dim=1)))


class Conditioned(UNet):
    """A second image that helps encode the first, and decode: a condition, not a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.e = conv_block(19, 8)

    def forward(self, x: Tensor, hint: Tensor) -> Tensor:  # type: ignore[override]
        a = self.a(x)
        b = self.b(halve(a) + halve(hint).mean(1, keepdim=True))
        x = self.d(torch.cat([double(self.c(halve(b))), b], dim=1))
        return self.head(self.e(torch.cat([double(x), a, hint], dim=1)))


class Refined(nn.Module):
    """Reads the input again beside what a UNet made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.unet, self.head = UNet(), nn.Conv2d(6, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([x, self.unet(x)], dim=1))


class Shell(nn.Module):
    """A residual sum around whatever it holds."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class TwoReaders(UNet):
    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Conv2d(16, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        joined = torch.cat([double(self.c(halve(a))), a], dim=1)
        return self.head(self.e(joined) + self.short(joined))


class InlineActivation(UNet):
    def join(self, x: Tensor, skip: Tensor) -> Tensor:
        return F.silu(super().join(x, skip))


class SharedBlock(UNet):
    def __init__(self) -> None:
        super().__init__()
        self.d = self.e


class RunTwice(nn.Module):
    """Classifier-free guidance inside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = UNet()

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.unet(x) - self.unet(x / 2)
