"""Folding constants into the weights that read the skips, and taking them out again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from families.small import decoder, images, uvit
from scalelong import fuse_skips, scale_skips, unscale_skips
from scalelong.theory.unet import TheoryUNet


def test_a_fused_model_is_a_vanilla_checkpoint_of_the_same_function() -> None:
    model, inputs = uvit(), images()
    scaled = scale_skips(model, "cs", kappa=0.7)(*inputs)
    vanilla = uvit()
    vanilla.load_state_dict(fuse_skips(model).state_dict(), strict=True)
    torch.testing.assert_close(vanilla(*inputs), scaled, rtol=1e-5, atol=1e-6)


def test_a_trained_kappa_fuses() -> None:
    model, inputs = scale_skips(uvit(), "learned-kappa", init=0.5), images()
    nn.init.constant_(model.skip_scaling.decay, -0.1)
    scaled = model(*inputs)
    torch.testing.assert_close(fuse_skips(model)(*inputs), scaled, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["ls", "ls-individual", "ie", "norm"])
def test_fusing_refuses_a_gate_that_depends_on_the_input(method: str) -> None:
    model = scale_skips(uvit(), method)
    with pytest.raises(ValueError, match="depend on the input"):
        fuse_skips(model)
    assert model.skip_scaling is not None


def test_fusing_refuses_an_added_skip_and_a_plain_model() -> None:
    with pytest.raises(ValueError, match="added to the trunk"):
        fuse_skips(scale_skips(TheoryUNet(8, 2), "cs"))
    with pytest.raises(ValueError, match="no scaled skips to fuse"):
        fuse_skips(uvit())


def test_after_norm_scaling_folds_into_the_norms_own_scale_and_shift() -> None:
    from diffusers import UNet2DModel

    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    model = UNet2DModel(16, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=4, **blocks).eval()
    x, names = torch.randn(2, 3, 16, 16), list(model.state_dict())
    scaled = scale_skips(model, "cs", kappa=0.5, where="after-norm")(x, 10).sample
    fused = fuse_skips(model)(x, 10).sample
    torch.testing.assert_close(fused, scaled, rtol=1e-4, atol=1e-5)
    assert list(model.state_dict()) == names


def test_preserved_weights_that_were_trained_are_multiplied_back_on_undo() -> None:
    model, inputs = uvit(), images()
    scale_skips(model, "cs", kappa=0.5, preserve=True)
    with torch.no_grad():
        for parameter in model.out_blocks.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    trained = model(*inputs)
    torch.testing.assert_close(unscale_skips(model)(*inputs), trained, rtol=1e-5, atol=1e-6)


def test_weights_that_two_skips_share_are_not_fused() -> None:
    model = uvit()
    model.out_blocks[1].skip_linear = model.out_blocks[0].skip_linear
    scale_skips(model, "cs")
    with pytest.raises(ValueError, match="is read by the same weight"):
        fuse_skips(model)


@pytest.mark.parametrize("layer", [nn.Conv2d(8, 6, 3), nn.ConvTranspose2d(8, 6, 3)])
def test_every_kind_of_convolution_is_fused_along_its_input_channels(layer: nn.Module) -> None:
    model, sites = decoder(layer)
    joined = torch.randn(2, 8, 5, 5)
    scaled = scale_skips(model, "uniform", value=0.5, sites=sites)["decoder"](joined)
    torch.testing.assert_close(fuse_skips(model)["decoder"](joined), scaled)


class Doubled(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


@pytest.mark.parametrize(
    "layer, reason",
    [
        (nn.Conv2d(8, 8, 1, groups=2), "is a grouped convolution"),
        (Doubled(8, 8, 1), "is not a plain Linear or convolution"),
        (nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 1)), "is not a plain Linear or convolution"),
        (nn.ReLU(), "is not a plain Linear or convolution"),
    ],
)
def test_a_layer_that_no_weight_can_imitate_is_not_fused(layer: nn.Module, reason: str) -> None:
    model, sites = decoder(layer)
    scale_skips(model, "uniform", value=0.5, sites=sites)
    with pytest.raises(ValueError, match=reason):
        fuse_skips(model)


def test_preserved_weights_are_restored_after_their_parameters_were_replaced() -> None:
    model, inputs = uvit(), images()
    plain = model(*inputs)
    scale_skips(model, "cs", kappa=0.7, preserve=True)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    assert torch.equal(unscale_skips(model)(*inputs), plain)


def test_preserving_refuses_weights_that_would_overflow() -> None:
    model = uvit().half()
    nn.init.constant_(model.out_blocks[0].skip_linear.weight, 100.0)
    with pytest.raises(ValueError, match="would overflow out_blocks.0.skip_linear.weight"):
        scale_skips(model, "cs", kappa=0.01, preserve=True)
    assert (model.out_blocks[0].skip_linear.weight == 100).all()


@pytest.mark.parametrize("kappa", [0.7, 0.5])
def test_preserving_again_keeps_the_function_and_undo_restores_it_exactly(kappa: float) -> None:
    model, inputs = uvit(), images()
    plain = model(*inputs)
    for again in (0.7, kappa):
        scale_skips(model, "cs", kappa=again, preserve=True)
        torch.testing.assert_close(model(*inputs), plain, rtol=1e-5, atol=1e-6)
    assert torch.equal(unscale_skips(model)(*inputs), plain)


def test_preserving_again_that_is_refused_leaves_the_divided_weights_as_they_were() -> None:
    model = scale_skips(uvit().half(), "cs", kappa=0.5, preserve=True)
    divided = model.out_blocks[0].skip_linear.weight.clone()
    with pytest.raises(ValueError, match="would overflow"):
        scale_skips(model, "uniform", value=1e-7, preserve=True)
    assert torch.equal(model.out_blocks[0].skip_linear.weight, divided)
