"""What tracing says about the way of a skip: what reads it, what changes it first, and in which dimension it lies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scalelong import AbsorbedScalingWarning, Argument, fuse_skips, scale_skips
from scalelong.skips.trace import trace_skips


def picture() -> Tensor:
    return torch.randn(2, 3, 16, 16)


class OnTheWay(nn.Module):
    """A block that joins what `way` makes of its skip, and may read the skip once more."""

    def __init__(self, way: nn.Module, width: int, also: nn.Module | None = None) -> None:
        super().__init__()
        self.way, self.also = way, also
        self.conv, self.short = nn.Conv2d(8 + width, 8, 3, padding=1), nn.Conv2d(8 + width, 8, 1)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        larger = nn.functional.interpolate(x, scale_factor=2)
        joined = torch.cat([larger, self.way(skip)], dim=1)
        output = self.conv(joined).relu() + self.short(joined)
        return output if self.also is None else output + self.also(skip)


class Blockwise(nn.Module):
    """Two levels, whose blocks are called with trunk and skip."""

    def __init__(self, outer: nn.Module, inner: nn.Module) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.c, self.outer, self.inner = nn.Conv2d(8, 8, 3, stride=2, padding=1), outer, inner
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(a)
        return self.head(self.outer(self.inner(self.c(b), b), a))


def projecting() -> OnTheWay:
    return OnTheWay(nn.Conv2d(8, 4, 1), 4)


def normalising() -> OnTheWay:
    return OnTheWay(nn.GroupNorm(2, 8), 8)


def reading_twice() -> OnTheWay:
    return OnTheWay(nn.Identity(), 8, also=nn.Conv2d(8, 8, 1))


@pytest.mark.parametrize("block", [projecting, normalising, reading_twice])
def test_a_skip_that_the_readers_of_the_join_do_not_read_alone_has_none(block: Any) -> None:
    sites = trace_skips(Blockwise(block(), block()), picture())
    assert [(site.entry, site.width, site.readers) for site in sites] == [(Argument(1, "skip"), 8, ())] * 2


@pytest.mark.parametrize("block", [projecting, normalising, reading_twice])
def test_a_skip_that_is_changed_on_its_way_is_not_folded(block: Any) -> None:
    model, x = Blockwise(block(), block()).eval(), picture()
    before = model(x)
    with pytest.raises(ValueError, match="cannot be folded"):
        scale_skips(model, "learnable", init=0.5, example_inputs=x, preserve=True)
    assert torch.equal(model(x), before)
    scale_skips(model, "ls", example_inputs=x)(x)


def test_a_norm_on_the_way_to_the_join_absorbs_and_a_projection_does_not() -> None:
    model, x = Blockwise(normalising(), normalising()), picture()
    with pytest.warns(AbsorbedScalingWarning):
        scale_skips(model, "cs", example_inputs=x)
    scale_skips(Blockwise(projecting(), projecting()), "cs", example_inputs=x)


class Crop(nn.Module):
    """Keeps an even number of rows and columns, as decoders do whose trunk was rounded down."""

    def forward(self, skip: Tensor) -> Tensor:
        return skip[:, :, : skip.shape[2] // 2 * 2, : skip.shape[3] // 2 * 2]


def test_a_skip_that_is_only_cropped_on_its_way_is_folded() -> None:
    model, x = Blockwise(OnTheWay(Crop(), 8), OnTheWay(Crop(), 8)).eval(), torch.randn(2, 3, 17, 17)
    model.b, model.c = nn.Conv2d(8, 8, 2, stride=2), nn.Conv2d(8, 8, 2, stride=2)
    scaled = scale_skips(model, "cs", kappa=0.5, example_inputs=x)(x)
    torch.testing.assert_close(fuse_skips(model)(x), scaled, rtol=1e-5, atol=1e-6)


class Moved(nn.Module):
    """Joins along dimension 1 and reads the channels, or the columns, as the last dimension."""

    def __init__(self, *readers: nn.Module, columns: bool = False) -> None:
        super().__init__()
        self.readers, self.columns, self.mix = nn.ModuleList(readers), columns, nn.Conv2d(16, 8, 1)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        joined = torch.cat([nn.functional.interpolate(x, scale_factor=2), skip], dim=1)
        if self.columns:
            return self.mix(sum(reader(joined) for reader in self.readers))
        last = joined.permute(0, 2, 3, 1)
        return self.mix(sum(reader(last) for reader in self.readers).permute(0, 3, 1, 2))


def moved(*readers: type[nn.Module], columns: bool = False) -> Blockwise:
    def block() -> Moved:
        made = [reader(16, 16) if reader is nn.Linear else reader(16) for reader in readers]
        return Moved(*made, columns=columns)

    return Blockwise(block(), block()).eval()


def test_a_norm_that_reads_the_skip_in_another_dimension_is_not_scaled_behind() -> None:
    x = picture()
    for model in (moved(nn.LayerNorm), moved(nn.LayerNorm, nn.Linear)):
        assert all(site.absorbed for site in trace_skips(model, x))
        with pytest.raises(ValueError, match="needs to know what reads skip"):
            scale_skips(model, "cs", example_inputs=x, where="after-norm")


def test_a_linear_that_reads_the_channels_through_a_permute_is_folded() -> None:
    model, x = moved(nn.Linear), picture()
    scaled = scale_skips(model, "cs", kappa=0.5, example_inputs=x)(x)
    torch.testing.assert_close(fuse_skips(model)(x), scaled, rtol=1e-5, atol=1e-6)


def test_a_linear_that_reads_another_dimension_than_the_channels_is_not_folded() -> None:
    model, x = Blockwise(Moved(nn.Linear(16, 16), columns=True), Moved(nn.Linear(8, 8), columns=True)), picture()
    scale_skips(model, "cs", example_inputs=x)
    with pytest.raises(ValueError, match="cannot be folded"):
        fuse_skips(model)
