"""Laws of the theory as functions of numbers."""

from __future__ import annotations

import math

import pytest
import torch

from scalelong.skips import constant_coefficients
from scalelong.theory import laws as theory

SKIPS = [[1.0], [1.0, 0.5], [0.3, 1.0, 0.7], [0.7**i for i in range(6)]]


def by_recursion(kappas: list[float], index: int, gain: float) -> float:
    """E‖h_i‖²/‖x‖² by Eq. 3: the encoders before f_i, then each decoder of the sum of its skip and what is below."""
    below = gain
    for kappa in reversed(kappas[index:]):
        below = gain * (kappa**2 * gain + gain * below)
    return gain**index * below


@pytest.mark.parametrize("kappas", SKIPS)
@pytest.mark.parametrize("gain", [1.0, 2.0, 0.5])
def test_the_feature_law_solves_the_recursion_of_equation_3(kappas: list[float], gain: float) -> None:
    for index in range(len(kappas) + 1):
        expected = by_recursion(kappas, index, gain)
        assert theory.feature_norm(kappas, index, gain=gain) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kappas", SKIPS)
def test_with_gain_1_the_feature_law_is_theorem_3_1_with_the_input_added(kappas: list[float]) -> None:
    law = theory.feature_norm(kappas, 0, gain=1.0)
    assert law == pytest.approx(sum(kappa**2 for kappa in kappas) + 1, rel=1e-12)


def test_with_kaimings_gain_no_single_constant_fits_theorem_3_1() -> None:
    # Moving the same Σκ_j² from the outermost skip to the innermost would change nothing if c1 were one constant.
    outer, inner = theory.feature_norm([1.0, 0.0]), theory.feature_norm([0.0, 1.0])
    assert inner - outer == 2**4 - 2**2


@pytest.mark.parametrize("kappas", SKIPS)
def test_the_last_matrix_of_the_network_has_the_gradient_of_its_input(kappas: list[float]) -> None:
    # Its gradient is v·uᵀ with h_0 = W·u, and W doubles squared norms.
    assert theory.feature_norm(kappas) == pytest.approx(2 * theory.gradient_norm(kappas, 1), rel=1e-12)


@pytest.mark.parametrize("kappas", SKIPS)
def test_with_gain_1_the_gradient_law_is_theorem_3_3_with_the_middle_added(kappas: list[float]) -> None:
    for block in range(1, len(kappas) + 1):
        expected = sum(kappa**2 for kappa in kappas[block - 1 :]) + 1
        assert theory.gradient_norm(kappas, block, gain=1.0) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_spread_of_a_chain_of_blocks_is_that_of_independent_factors(depth: int) -> None:
    factor = (1 + 2 / 64) * (1 + 5 / 64) ** (depth - 1)
    spread = theory.feature_spread([1.0] * 4, 4, width=64, block_depth=depth)
    assert spread == pytest.approx(factor**5 - 1, rel=1e-12)


def test_the_spread_does_not_depend_on_a_gain_that_all_paths_share() -> None:
    spreads = [theory.feature_spread([0.0], width=64, gain=gain) for gain in (0.5, 1.0, 2.0)]
    assert spreads == pytest.approx([spreads[0]] * 3, rel=1e-12)


def test_the_band_is_likelier_for_wider_networks_and_wider_bands_and_unlikelier_for_deeper_ones() -> None:
    def stated(num_skips: int, width: int, rho: float) -> float:
        spread = theory.feature_spread([1.0] * num_skips, width=width)
        return theory.band_probability(num_skips, spread, rho)

    assert 0 < stated(2, 512, 0.5) < stated(2, 1024, 0.5) < stated(2, 1024, 0.8) < 1
    assert stated(4, 1024, 0.5) < stated(2, 1024, 0.5)
    assert stated(12, 64, 0.5) == 0


def test_the_band_is_one_plus_minus_rho_squared() -> None:
    assert theory.feature_band(8.0, 0.5) == (2.0, 18.0)


@pytest.mark.parametrize(("mean_alpha_bar", "expected"), [(0.0, 12.0), (1.0, 4.0), (0.5, 8.0)])
def test_lemma_3_2_goes_from_pure_noise_to_pure_uniform_data(mean_alpha_bar: float, expected: float) -> None:
    assert theory.input_norm(mean_alpha_bar, 12) == pytest.approx(expected, rel=1e-15)


def test_theorem_3_4_sums_the_paths_through_every_skip_and_the_middle() -> None:
    assert theory.robustness_bound([1.0, 0.5, 0.25], 2.0, 3.0) == 2 + 0.5 * 4 + 0.25 * 8 + 8 * 3


def test_theorem_3_4_needs_the_product_of_the_blocks_norms() -> None:
    """With M_0 = ‖b∘a‖ = 1 the middle, a swap, turns what a enlarges into what b enlarges: 100 times, not 2."""
    a, b, middle = torch.diag(torch.tensor([10.0, 0.1])), torch.diag(torch.tensor([0.1, 10.0])), torch.eye(2).flip(0)
    norm = torch.linalg.matrix_norm
    change = norm(b @ (a + middle @ a), 2).item()
    assert norm(b @ a, 2).item() == pytest.approx(1)
    assert change > theory.robustness_bound([1.0], 1.0, 1.0)
    assert change <= theory.robustness_bound([1.0], (norm(a, 2) * norm(b, 2)).item(), 1.0)


@pytest.mark.parametrize("num_skips", [2, 6, 12])
def test_cs_is_kappa_to_the_n_minus_2_smaller_than_uniform_scaling(num_skips: int) -> None:
    cs, uniform = (theory.robustness_order(method, num_skips, 3.0, 0.7) for method in ("cs", "uniform"))
    assert cs == pytest.approx(0.7 ** (num_skips - 2) * uniform, rel=1e-12)


@pytest.mark.parametrize("gain", [2.0, 5.0])
@pytest.mark.parametrize("num_skips", [1, 6, 12])
def test_each_bound_stays_within_a_constant_of_its_order(num_skips: int, gain: float) -> None:
    def sum_over_order(method: str, kappas: list[float], kappa: float) -> float:
        return theory.robustness_bound(kappas, gain, 0.0) / theory.robustness_order(method, num_skips, gain, kappa)  # type: ignore[arg-type]

    ones, cs = [1.0] * num_skips, constant_coefficients(num_skips, 0.7).tolist()
    assert sum_over_order("none", ones, 1.0) <= 1
    # Geometric sums: at most 1/(1 − 1/r) times their last term, r the ratio of neighbours.
    assert 1 <= sum_over_order("uniform", [0.7] * num_skips, 0.7) <= gain / (gain - 1)
    ratio = 0.7 * gain
    assert 1 - 1e-6 <= sum_over_order("cs", cs, 0.7) <= ratio / (ratio - 1)


def test_the_sum_of_squares_of_cs_is_that_of_its_coefficients() -> None:
    squares = constant_coefficients(6, 0.7).double().square().sum().item()
    assert theory.sum_of_squares(6, 0.7) == pytest.approx(squares, rel=1e-6)
    assert theory.sum_of_squares(6, 1.0) == 6


def test_numbers_out_of_range_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="index must lie in 0 … 2, got 3"):
        theory.feature_norm([1.0, 1.0], 3)
    with pytest.raises(ValueError, match="blocks are counted from 1 to 3"):
        theory.gradient_norm([1.0, 1.0], 0)
    with pytest.raises(ValueError, match=r"rho must lie in \(0, 1\], got 0"):
        theory.band_probability(2, 0.1, 0)
    with pytest.raises(ValueError, match="method must be one of none, uniform, cs"):
        theory.robustness_order("ls", 2, 2.0)  # type: ignore[arg-type]


def test_gradients_grow_outward_by_what_their_own_skip_adds() -> None:
    kappas = [0.7**i for i in range(4)]
    for block in range(1, 5):
        difference = theory.gradient_norm(kappas, block) - theory.gradient_norm(kappas, block + 1)
        assert difference == pytest.approx(2 ** (2 * block - 1) * kappas[block - 1] ** 2, rel=1e-9)
    assert math.isclose(theory.gradient_norm(kappas, 5), 2**8)
