"""Scaling residual branches: the controls of Table 3."""

from __future__ import annotations

import pytest
import torch

from families.small import images, uvit
from scalelong import scale_blocks, scale_skips, unscale_blocks
from scalelong.theory.unet import TheoryUNet


def test_rezero_starts_as_the_identity_of_every_block() -> None:
    model = scale_blocks(uvit(), "rezero")
    tokens = torch.randn(2, 17, 32)
    assert torch.equal(model.mid_block(tokens), tokens)
    assert model.block_scaling.factors.shape == (2 * 7,)
    assert model.block_scaling.factors.requires_grad


def test_stable_multiplies_every_residual_branch_by_tau() -> None:
    model, tokens = uvit(), torch.randn(2, 17, 32)
    block = model.mid_block
    middle = tokens + 0.3 * block.attn(block.norm1(tokens))
    expected = middle + 0.3 * block.mlp(block.norm2(middle))
    scale_blocks(model, "stable", tau=0.1)
    scale_blocks(model, "stable", tau=0.3)
    torch.testing.assert_close(block(tokens), expected)


def test_unscaling_blocks_is_exact_and_leaves_the_skips_alone() -> None:
    model, inputs = scale_skips(uvit(), "cs"), images()
    before = model(*inputs)
    scale_blocks(model, "stable", tau=0.1)
    assert not torch.equal(model(*inputs), before)
    assert torch.equal(unscale_blocks(model)(*inputs), before)


@pytest.mark.parametrize(
    "call, message",
    [
        ({"method": "fixup"}, "unknown block scaling"),
        ({"method": "stable"}, "needs tau"),
        ({"method": "stable", "tau": float("nan")}, "needs tau"),
        ({"method": "rezero", "tau": 0.1}, 'tau belongs to "stable"'),
    ],
)
def test_bad_block_scaling_is_explained(call: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scale_blocks(uvit(), **call)
    with pytest.raises(ValueError, match="scale_blocks is for UViT"):
        scale_blocks(TheoryUNet(8, 2), "rezero")
