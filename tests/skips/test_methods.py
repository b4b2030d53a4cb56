"""What each method multiplies a skip by."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from scalelong import METHODS, Argument, Channels, SkipScaling, SkipSite, constant_coefficients, scale_skips
from scalelong.models import UViT
from scalelong.skips.methods import ConstantScaling, LearnedKappa

CONV = [SkipSite(i, f"up.{i}", Channels(8, 8 + width), width) for i, width in ((1, 8), (2, 8), (3, 16))]
TOKENS = [SkipSite(i, f"out.{i}", Argument(1), width=5, joined=Channels(8, 16, dim=-1)) for i in (1, 2)]


def make(name: str, sites: list[SkipSite], **options: object) -> SkipScaling:
    kind = METHODS[name]
    assert kind is not None
    return kind(sites, **options)


def coefficients(scaling: SkipScaling) -> list[float]:
    constants = scaling.constants()
    assert constants is not None
    return constants.tolist()


def tiny_uvit() -> UViT:
    return UViT(img_size=8, patch_size=2, embed_dim=32, depth=6, num_heads=2).eval()


@given(st.integers(1, 20), st.floats(0.01, 1.0))
def test_cs_shrinks_by_kappa_from_each_skip_to_the_next_inner_one(num_skips: int, kappa: float) -> None:
    values = constant_coefficients(num_skips, kappa)
    assert values[0] == 1
    torch.testing.assert_close(values[1:], values[:-1] * kappa)


def test_the_constant_methods_give_the_papers_coefficients() -> None:
    assert coefficients(make("cs", CONV, kappa=0.5)) == [1.0, 0.5, 0.25]
    assert coefficients(make("cs-reversed", CONV, kappa=0.5)) == [0.125, 0.25, 0.5]
    assert coefficients(make("uniform", CONV)) == pytest.approx([1 / math.sqrt(2)] * 3)
    assert coefficients(make("learnable", CONV, init=0.3)) == pytest.approx([0.3] * 3)
    assert coefficients(make("learned-kappa", CONV, init=0.5)) == pytest.approx([1.0, 0.5, 0.25])


def cs_by_hand(model: UViT, x: Tensor, t: Tensor, kappa: float) -> Tensor:
    """The forward of U-ViT with kappa^(i-1) written into it."""
    tokens = model._embed(x, t, None, None) + model.pos_embed
    skips = []
    for block in model.in_blocks:
        tokens = block(tokens)
        skips.append(tokens)
    tokens = model.mid_block(tokens)
    for block in model.out_blocks:
        index = len(skips)
        joined = torch.cat([tokens, skips.pop() * kappa ** (index - 1)], dim=-1)
        tokens = block.skip_linear(joined)
        tokens = tokens + block.attn(block.norm1(tokens))
        tokens = tokens + block.mlp(block.norm2(tokens))
    pixels = model.decoder_pred(model.norm(tokens))[:, model.extras :]
    return model.final_layer(model._unpatchify(pixels, model.grid))


def test_cs_on_uvit_equals_a_hand_written_scaled_uvit_to_the_bit() -> None:
    model = tiny_uvit()
    x, t = torch.randn(2, 3, 8, 8), torch.tensor([3.0, 700.0])
    by_hand = cs_by_hand(model, x, t, 0.7)
    assert torch.equal(scale_skips(model, "cs", kappa=0.7)(x, t), by_hand)


@pytest.mark.parametrize("shape", [(2, 16, 4, 4), (2, 16, 7), (3, 16)])
def test_ls_equals_equation_9_written_out(shape: tuple[int, ...]) -> None:
    scaling = make("ls", CONV, ratio=4)
    gate, skip = scaling.gates["width16"], torch.randn(shape)
    for b in range(shape[0]):
        pooled = torch.tensor([skip[b, c].mean() for c in range(16)])
        hidden = (gate.squeeze.weight @ pooled + gate.squeeze.bias).clamp(min=0)
        kappa = 1 / (1 + torch.exp(-(gate.excite.weight @ hidden + gate.excite.bias)))
        expected = torch.stack([skip[b, c] * kappa[c] for c in range(16)])
        torch.testing.assert_close((skip * scaling.coefficient(3, skip))[b], expected, rtol=1e-6, atol=1e-6)


def test_ls_on_uvit_weighs_tokens_and_pools_the_token_width() -> None:
    scaling, skip = make("ls", TOKENS, ratio=2), torch.randn(2, 5, 8)
    coefficient = scaling.coefficient(1, skip)
    assert coefficient.shape == (2, 5, 1)
    shuffled = skip[:, :, torch.randperm(8)]
    torch.testing.assert_close(scaling.coefficient(1, shuffled), coefficient)


def test_a_channel_gate_does_not_depend_on_the_number_of_tokens() -> None:
    scaling = make("ls", TOKENS, ratio=2, gate="channels")
    assert scaling.coefficient(1, torch.randn(2, 5, 8)).shape == (2, 1, 8)
    assert scaling.coefficient(1, torch.randn(2, 99, 8)).shape == (2, 1, 8)


def test_a_token_gate_at_another_resolution_says_what_to_use() -> None:
    with pytest.raises(ValueError, match=r'weighs 5 positions but the skip has 9.*gate="channels"'):
        make("ls", TOKENS).coefficient(1, torch.randn(2, 9, 8))


def test_a_shared_gate_is_shared_per_width_and_individual_gates_are_not() -> None:
    assert list(make("ls", CONV).gates) == ["width8", "width16"]
    assert list(make("ls-individual", CONV).gates) == ["skip1", "skip2", "skip3"]


@pytest.mark.parametrize("tokens, added", [(257, 8_497), (258, 8_530), (334, 13_714)])
def test_ls_adds_the_papers_number_of_parameters(tokens: int, added: int) -> None:
    sites = [SkipSite(i, f"out.{i}", Argument(1), width=tokens) for i in range(1, 7)]
    assert sum(p.numel() for p in make("ls", sites).parameters()) == added


@pytest.mark.parametrize("activation, function", [("relu", nn.ReLU()), ("elu", nn.ELU()), ("mish", nn.Mish())])
def test_the_activation_is_the_one_asked_for(activation: str, function: nn.Module) -> None:
    scaling, skip = make("ls", CONV[:1], ratio=2, activation=activation), torch.randn(2, 8, 4)
    gate = scaling.gates["width8"]
    expected = torch.sigmoid(gate.excite(function(gate.squeeze(skip.mean(-1)))))
    torch.testing.assert_close(scaling.coefficient(1, skip), expected[:, :, None])


@pytest.mark.parametrize("name", ["ls", "ls-individual", "ie"])
def test_init_is_the_coefficient_at_the_start_whatever_the_input(name: str) -> None:
    coefficient = make(name, CONV, init=0.8).coefficient(3, torch.randn(2, 16, 4, 4) * 10)
    torch.testing.assert_close(coefficient, torch.full((2, 16, 1, 1), 0.8))


def test_ie_scales_and_shifts_the_pooled_value() -> None:
    scaling, skip = make("ie", CONV[:1]), torch.randn(2, 8, 4)
    gate = scaling.gates["width8"]
    nn.init.normal_(gate.scale)
    nn.init.normal_(gate.shift)
    expected = torch.sigmoid(gate.scale * skip.mean(-1) + gate.shift)[:, :, None]
    torch.testing.assert_close(scaling.coefficient(1, skip), expected)


@pytest.mark.parametrize("sites, shape, dim", [(CONV[:1], (2, 8, 4, 4), 1), (TOKENS, (2, 5, 8), -1)])
def test_norm_gives_every_position_the_root_mean_square_of_its_gain(sites: list, shape: tuple, dim: int) -> None:
    scaling, skip = make("norm", sites, init=3.0), torch.randn(shape) * 100
    normed = skip * scaling.coefficient(1, skip)
    rms = normed.square().mean(dim).sqrt()
    torch.testing.assert_close(rms, torch.full_like(rms, 3.0))


@pytest.mark.parametrize("start", [1.0, 0.7, 1e-3])
def test_learned_kappa_stays_in_its_range_and_never_stops_learning(start: float) -> None:
    scaling = LearnedKappa(CONV, init=start)
    optimiser = torch.optim.SGD(scaling.parameters(), lr=0.5)
    for _ in range(50):
        optimiser.zero_grad()
        loss = -scaling.coefficient(3, torch.empty(0))  # pushes kappa up, against its bound
        loss.backward()
        assert scaling.decay.grad is not None and scaling.decay.grad != 0
        optimiser.step()
        assert 0 < scaling.kappa.item() <= 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in METHODS if name != "none"])
def test_a_half_precision_skip_stays_in_half_precision_and_finite(name: str, dtype: torch.dtype) -> None:
    scaling = make(name, CONV).to(dtype)
    skip = (torch.randn(2, 16, 64, 64) * 2000).to(dtype)
    scaled = skip * scaling.coefficient(3, skip)
    assert scaled.dtype == dtype
    assert scaled.isfinite().all()


@pytest.mark.parametrize("count", [2, 4])
def test_fixed_coefficients_are_one_for_each_skip(count: int) -> None:
    sites = [SkipSite(index, f"block{index}", Argument("skip"), 8) for index in (1, 3)]
    assert ConstantScaling(sites, [1.0, 0.5, 0.25]).coefficients.dtype == torch.float32
    with pytest.raises(ValueError, match="3 coefficients are needed, one per skip"):
        ConstantScaling(sites, [1.0] * count)
