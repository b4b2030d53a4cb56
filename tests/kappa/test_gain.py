"""Laws of the block gain of a network."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from scalelong import Channels, SkipSite, find_skips, scale_skips
from scalelong.kappa.block_gain import BlockGain, measure_gain
from scalelong.models import UViT
from scalelong.theory import TheoryUNet


def orthogonal_unet(pair_gains: list[float], width: int = 16) -> TheoryUNet:
    """Linear blocks that are rotations times a number: the pair (a_i, b_i) enlarges every vector by pair_gains[i]."""
    generator = torch.Generator().manual_seed(0)
    model = TheoryUNet(width, len(pair_gains), block_depth=1, generator=generator)
    for gain, *pair in zip(pair_gains, model.encoders, model.decoders, strict=True):
        for block in pair:
            (matrix,) = block.parameters()
            matrix.data = nn.init.orthogonal_(matrix.data, gain=math.sqrt(gain), generator=generator)
    return model


def gains_of(model: TheoryUNet) -> BlockGain:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, model.width, generator=generator)
    return measure_gain(model, model, x, find_skips(model), generator=generator)


@pytest.mark.parametrize("gain", [0.5, 1.0, 1.6, 4.0])
def test_a_gain_known_by_construction_is_found_to_two_percent(gain: float) -> None:
    found = gains_of(orthogonal_unet([gain] * 6))
    assert found.gain == pytest.approx(gain, rel=0.02)
    assert found.largest_kappa == pytest.approx(min(1, 1 / gain), rel=0.02)


def test_the_path_through_a_skip_multiplies_the_gains_of_the_pairs_up_to_it() -> None:
    gains = [1.3, 1.1, 1.7, 0.9, 1.2]
    expected = torch.tensor(gains).cumprod(0).tolist()
    assert gains_of(orthogonal_unet(gains)).path_gains == pytest.approx(expected, rel=1e-5)


def jacobian_norm(model: TheoryUNet, skip: int, x: Tensor) -> float:
    """The spectral norm of ∂output/∂(skip i as it enters) · ∂(skip i)/∂x, from whole Jacobians."""

    def skips(x: Tensor) -> list[Tensor]:
        found = []
        for encoder in model.encoders:
            x = encoder(x)
            found.append(x)
        return found

    def output(entering: Tensor) -> Tensor:
        held = skips(x)
        below, held[skip] = model.middle(held[-1]), entering
        for decoder, skip_of in zip(reversed(model.decoders), reversed(held), strict=True):
            below = decoder(below, skip_of)
        return below

    jacobian = torch.autograd.functional.jacobian
    inward, outward = jacobian(lambda x: skips(x)[skip], x), jacobian(output, skips(x)[skip])
    return torch.linalg.matrix_norm(outward @ inward, 2).item()


def test_path_gains_are_the_spectral_norms_of_the_jacobians_at_the_worst_input() -> None:
    model = TheoryUNet(8, 3, generator=torch.Generator().manual_seed(0)).double()
    x = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = [max(jacobian_norm(model, skip, row) for row in x) for skip in range(3)]
    found = measure_gain(model, model, x, find_skips(model), tolerance=1e-12, max_steps=3000)
    assert found.path_gains == pytest.approx(expected, rel=1e-6)


def test_a_scaling_of_the_skips_does_not_count_and_the_model_is_left_as_it_was() -> None:
    model = orthogonal_unet([1.5] * 3).train()
    plain = gains_of(model).path_gains
    scale_skips(model, "cs", kappa=0.5)
    x = torch.randn(2, 16)
    before = model(x)
    assert gains_of(model).path_gains == plain
    assert model.training and torch.equal(model(x), before)
    assert all(parameter.grad is None for parameter in model.parameters())


class Concatenating(nn.Module):
    """One skip that arrives as the last channels of a convolution's input."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Conv2d(2, 2, 1, bias=False), nn.Conv2d(4, 2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        return self.decoder(torch.cat([x.tanh(), x], dim=1))


def test_a_skip_that_was_concatenated_is_followed_alone() -> None:
    model = Concatenating()
    site = SkipSite(index=1, consumer="decoder", entry=Channels(2, 4), width=2)
    found = measure_gain(model, model, torch.randn(2, 2, 3, 3), [site], tolerance=1e-7, max_steps=1000)
    path = model.decoder.weight[:, 2:, 0, 0] @ model.encoder.weight[:, :, 0, 0]
    assert found.path_gains == pytest.approx([torch.linalg.matrix_norm(path, 2).item()], rel=1e-4)
    assert found.gain == found.path_gains[0] and found.largest_kappa == 1


def test_attention_and_norms_are_no_obstacle() -> None:
    model = UViT(img_size=8, patch_size=4, in_chans=1, embed_dim=32, depth=4, num_heads=2)
    times = torch.tensor([100.0]).repeat(2)
    found = measure_gain(model, lambda x: model(x, times), torch.randn(1, 1, 8, 8), find_skips(model))
    assert len(found.path_gains) == 2 and min(found.path_gains) > 0


@pytest.mark.parametrize("gains", [[1.0, 1.5, 1.2, 6.0], [2.0, 1.0, 0.5], [3.0, 9.0]])
def test_with_the_largest_kappa_no_path_exceeds_the_outermost(gains: list[float]) -> None:
    found = BlockGain(gains)
    terms = [found.largest_kappa**i * gain for i, gain in enumerate(gains)]
    assert max(terms) == pytest.approx(gains[0], rel=1e-12)
    assert found.largest_kappa == 1 or max(terms[1:]) == pytest.approx(gains[0], rel=1e-12)


def test_a_last_layer_of_zeros_hides_the_gain_and_sets_no_limit() -> None:
    model = orthogonal_unet([2.0] * 3)
    next(model.decoders[0].parameters()).data.zero_()
    found = gains_of(model)
    assert math.isnan(found.gain) and found.largest_kappa == 1
