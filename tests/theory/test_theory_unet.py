"""Laws of the UNet of Eq. 3."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scalelong.theory import TheoryUNet


def seeded(width: int = 16, num_skips: int = 3, *, seed: int = 0, block_depth: int = 2) -> TheoryUNet:
    generator = torch.Generator().manual_seed(seed)
    return TheoryUNet(width, num_skips, block_depth=block_depth, generator=generator)


def block_by_hand(block: nn.Module, x: Tensor) -> Tensor:
    """W_l σ(W_{l−1} … σ(W_1 x)), from the matrices alone."""
    first, *others = block.parameters()
    x = x @ first.T
    for matrix in others:
        x = x.clamp(min=0) @ matrix.T
    return x


def f_by_hand(model: TheoryUNet, i: int, x: Tensor) -> Tensor:
    """f_i of Eq. 3 with every kappa equal to 1, by recursion."""
    if i == len(model.encoders):
        return block_by_hand(model.middle, x)
    encoded = block_by_hand(model.encoders[i], x)
    return block_by_hand(model.decoders[i], encoded + f_by_hand(model, i + 1, encoded))


@pytest.mark.parametrize(("num_skips", "block_depth"), [(1, 1), (3, 2), (6, 3)])
@torch.no_grad()
def test_the_network_is_equation_3(num_skips: int, block_depth: int) -> None:
    model = seeded(num_skips=num_skips, block_depth=block_depth)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    assert torch.equal(model(x), f_by_hand(model, 0, x))


def test_there_is_one_encoder_and_one_decoder_per_skip_and_no_bias() -> None:
    model = seeded(width=16, num_skips=3, block_depth=2)
    assert (len(model.encoders), len(model.decoders), model.num_skips, model.width) == (3, 3, 3, 16)
    assert [tuple(p.shape) for p in model.parameters()] == [(16, 16)] * (3 + 1 + 3) * 2


def test_entries_have_mean_zero_and_variance_two_over_the_width() -> None:
    # 5 blocks of 2 matrices of 256² entries: the mean is known to 1.1e-4 and the variance to 0.2 % (one sigma).
    entries = torch.cat([p.detach().flatten() for p in seeded(width=256, num_skips=2).parameters()])
    assert entries.mean().item() == pytest.approx(0, abs=5e-4)
    assert entries.var().item() == pytest.approx(2 / 256, rel=0.01)
    # A normal's fourth moment: uniform entries of the same variance would give 1.8.
    assert ((entries / entries.std()) ** 4).mean().item() == pytest.approx(3, rel=0.03)


def test_a_seed_fixes_every_weight_and_another_seed_changes_every_weight() -> None:
    first, again, other = seeded(seed=0), seeded(seed=0), seeded(seed=1)
    for a, b, c in zip(first.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


def test_a_passed_generator_leaves_the_global_one_alone() -> None:
    before = torch.get_rng_state()
    seeded()
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_generator_the_global_seed_decides() -> None:
    def first_matrix() -> Tensor:
        return next(TheoryUNet(8, 1).parameters())

    torch.manual_seed(5)
    first = first_matrix()
    torch.manual_seed(5)
    assert torch.equal(first_matrix(), first)
    assert not torch.equal(first_matrix(), first)


def test_the_network_follows_the_default_device() -> None:
    with torch.device("meta"):
        model = TheoryUNet(8, 2)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_compiling_the_whole_graph_gives_the_eager_output() -> None:
    model = seeded()
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    torch.compiler.reset()
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))


@pytest.mark.parametrize("name", ["width", "num_skips", "block_depth"])
def test_a_size_below_one_is_refused_by_name(name: str) -> None:
    sizes: dict[str, Any] = {"width": 8, "num_skips": 2, "block_depth": 2} | {name: 0}
    with pytest.raises(ValueError, match=f"{name} of at least 1, got 0"):
        TheoryUNet(**sizes)
