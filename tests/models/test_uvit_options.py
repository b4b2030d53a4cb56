"""Laws of the options of U-ViT that are off by default: QK-norm, a norm after the join, EDM2's balance of the join."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalelong import SkipScaling, find_skips, fuse_skips, scale_skips
from scalelong.models import UViT
from scalelong.models.uvit import Attention, Block, balance_factors

OPTIONS: dict[str, dict[str, Any]] = {
    "qk norm": {"qk_norm": True},
    "norm after the join": {"skip_norm": True},
    "balance": {"concat_balance": 0.3},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
UNABSORBED = [OPTIONS["qk norm"], OPTIONS["balance"]]


def build(**options: Any) -> UViT:
    torch.manual_seed(0)
    return UViT(8, 2, embed_dim=24, depth=6, num_heads=2, init_std=0.2, **options).eval()


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([3.0, 700.0])


@every_option
def test_an_option_draws_no_random_numbers_so_that_all_other_weights_start_as_without_it(
    options: dict[str, Any],
) -> None:
    plain, other = build().state_dict(), build(**options).state_dict()
    assert all(torch.equal(other[name], weights) for name, weights in plain.items())
    assert {name.split(".")[-2] for name in other.keys() - plain.keys()} <= {"q_norm", "k_norm", "skip_norm"}


@torch.no_grad()
@every_option
def test_an_option_changes_the_network_and_its_default_does_not_to_the_bit(options: dict[str, Any]) -> None:
    off = {name: type(value)(0.5 if isinstance(value, float) else 0) for name, value in options.items()}
    expected = build()(*inputs())
    assert torch.equal(build(**off)(*inputs()), expected)
    assert not torch.allclose(build(**options)(*inputs()), expected, rtol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_qk_norm_makes_attention_blind_to_the_size_of_queries_and_keys(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    attention, x = Attention(32, 4, qk_norm=True), torch.randn(2, 7, 32)
    with torch.autocast("cpu", enabled=dtype is torch.bfloat16):
        before = attention(x)
        attention.qkv.weight[:64] *= 64  # A power of two, exact in any precision; the last third makes the values.
        after = attention(x)
    assert after.dtype == dtype
    # The eps of the norms, beside a variance of 0.3 and more.
    torch.testing.assert_close(after, before, rtol=0, atol=1e-4 if dtype is torch.float32 else 1e-2)


@torch.no_grad()
def test_qk_norm_is_a_layer_norm_of_each_head() -> None:
    torch.manual_seed(0)
    attention, x = Attention(32, 4, qk_norm=True), torch.randn(2, 7, 32)
    for name, parameter in attention.named_parameters():
        if "_norm" in name:
            nn.init.normal_(parameter)
    query, key, value = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in attention.qkv(x).chunk(3, dim=-1))
    query, key = attention.q_norm(query), attention.k_norm(key)  # type: ignore[misc]
    expected = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
    torch.testing.assert_close(attention(x), attention.proj(expected), rtol=0, atol=1e-6)


@torch.no_grad()
def test_the_norm_after_the_join_reads_trunk_and_skip_together() -> None:
    torch.manual_seed(0)
    block = Block(16, 2, mlp_ratio=2.0, qkv_bias=False, skip=True, skip_norm=True)
    x, skip = torch.randn(2, 5, 16), 9 * torch.randn(2, 5, 16)
    joined = block.join(x, skip)
    assert torch.equal(joined, F.layer_norm(torch.cat([x, skip], dim=-1), (32,)))
    # Only their ratio counts.
    torch.testing.assert_close(block.join(3 * x, 3 * skip), joined, rtol=0, atol=1e-5)


@pytest.mark.parametrize("balance", [0.1, 0.3, 0.5, 0.9])
def test_the_balanced_join_keeps_a_common_magnitude_and_gives_the_skip_its_share(balance: float) -> None:
    trunk, skip = balance_factors(balance)
    assert trunk**2 + skip**2 == pytest.approx(2)  # Mean square 1 of both parts stays mean square 1 of all.
    assert skip / trunk == pytest.approx(balance / (1 - balance))


@torch.no_grad()
def test_at_edm2s_own_balance_the_join_is_a_plain_concatenation_as_trunk_and_skip_are_equally_wide() -> None:
    block = Block(16, 2, mlp_ratio=2.0, qkv_bias=False, skip=True, concat_balance=0.5)
    x, skip = torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    assert torch.equal(block.join(x, skip), torch.cat([x, skip], dim=-1))


@pytest.mark.parametrize("options", UNABSORBED, ids=["qk norm", "balance"])
def test_qk_norm_and_balance_leave_the_skips_where_and_as_they_are(options: dict[str, Any]) -> None:
    assert find_skips(build(**options)) == find_skips(build())


def test_a_norm_after_the_join_absorbs_and_is_the_reader() -> None:
    sites = find_skips(build(skip_norm=True))
    assert all(site.absorbed and site.readers == (f"{site.consumer}.skip_norm",) for site in sites)


@torch.no_grad()
@every_option
def test_a_constant_enters_the_join_as_exactly_kappa_times_the_skip(options: dict[str, Any]) -> None:
    model, joined = build(**options), []
    by_hand = copy.deepcopy(model)
    for index, block in enumerate(by_hand.out_blocks):
        join, kappa = block.join, 0.6 ** (2 - index)
        block.join = lambda x, skip, join=join, kappa=kappa: joined.append(skip) or join(x, skip * kappa)
    expected = by_hand(*inputs())
    assert len(joined) == 3
    # The coefficients of CS are computed in float32: an ulp or so.
    torch.testing.assert_close(scale_skips(model, "cs", kappa=0.6)(*inputs()), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "where"),
    [*((one, "input") for one in UNABSORBED), (OPTIONS["norm after the join"], "after-norm")],
    ids=[*("qk norm", "balance"), "norm after the join"],
)
def test_a_constant_fuses_into_the_first_layer_that_reads_it(options: dict[str, Any], where: str) -> None:
    model = scale_skips(build(**options), "cs", kappa=0.6, where=where)
    scaled = model(*inputs())
    fused = fuse_skips(model)
    assert list(fused.state_dict()) == list(build(**options).state_dict())
    # Another order of the same products.
    torch.testing.assert_close(fused(*inputs()), scaled, rtol=1e-4, atol=1e-5)


@every_option
def test_ls_learns_with_every_option(options: dict[str, Any]) -> None:
    model = scale_skips(build(**options), "ls", ratio=2, activation="elu")
    model(*inputs()).square().mean().backward()
    (gate,) = [module for module in model.modules() if isinstance(module, SkipScaling)]
    assert all(one.grad is not None and one.grad.abs().sum() > 0 for one in gate.parameters())


@pytest.mark.parametrize("balance", [0.0, 1.0])
def test_a_balance_that_leaves_one_of_both_out_is_refused(balance: float) -> None:
    with pytest.raises(ValueError, match=f"the skip's share of the join, between 0 and 1, got {balance}"):
        build(concat_balance=balance)
