"""The paper's results as functions of numbers, and the sharper law that the block gain gives (see docs/theory.md).

`kappas` are the coefficients κ_1 … κ_N, outermost first. A gain g is what a block does to the squared norm of its input
in expectation: 2 for an MLP of Kaiming matrices without ReLU after the last, because only a ReLU halves what each
matrix doubles. Theorem 3.1 has one constant for all skips, which is the case g = 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

KAIMING_GAIN = 2.0

# Of sums over one Gaussian matrix with entries N(0, 2/m): m·Var‖Wv‖²/‖Wv‖⁴, without and with the ReLU after it.
LINEAR_SPREAD, RELU_SPREAD = 2.0, 5.0


def input_norm(mean_alpha_bar: float, width: int, *, second_moment: float = 1 / 3) -> float:
    """Lemma 3.2: E‖x_t‖² = (1 − 2·E_t ᾱ_t/3)·m for x_0 ~ U[−1, 1]^m.

    For other data E‖x_t‖² = (1 − E_t ᾱ_t·(1 − s))·m with s = E‖x_0‖²/m, which is 1/3 for the uniform distribution.

    >>> input_norm(0.2755, 3072) / 3072
    0.8163...
    """
    return (1 - mean_alpha_bar * (1 - second_moment)) * width


def feature_norm(kappas: Sequence[float], index: int = 0, *, gain: float = KAIMING_GAIN) -> float:
    """E‖h_i‖²/‖x‖² = Σ_{j>i} g^{2j−i} κ_j² + g^{2N−i+1}, with h_i the output of f_i (the sharper Theorem 3.1).

    >>> feature_norm([1.0, 0.5], gain=1.0)
    2.25
    """
    check_index(kappas, index)
    count = len(kappas)
    skips = sum(gain ** (2 * j - index) * kappas[j - 1] ** 2 for j in range(index + 1, count + 1))
    return skips + gain ** (2 * count - index + 1)


def feature_band(centre: float, rho: float) -> tuple[float, float]:
    """(1−ρ)² and (1+ρ)² times the centre: Theorem 3.1's bounds of ‖h_i‖²."""
    check_rho(rho)
    return (1 - rho) ** 2 * centre, (1 + rho) ** 2 * centre


def feature_spread(
    kappas: Sequence[float], index: int = 0, *, width: int, gain: float = KAIMING_GAIN, block_depth: int = 2
) -> float:
    """Var‖h_i‖²/(E‖h_i‖²)² over networks of width m: exact, falls as 1/m and grows exponentially with N/m.

    >>> feature_spread([1.0], width=10**9) * 10**9
    17.99...
    """
    check_index(kappas, index)
    # A block multiplies the squared norm by a number of mean g and this second moment, whatever its input's direction.
    square = gain**2 * (1 + LINEAR_SPREAD / width) * (1 + RELU_SPREAD / width) ** (block_depth - 1)
    first, second = gain, square
    for kappa in reversed(kappas[index:]):
        squared = kappa**2
        second = square**2 * (squared**2 + second + (2 + 4 / width) * squared * first)
        first = gain**2 * (squared + first)
    return square**index * second / (gain**index * first) ** 2 - 1


def band_probability(num_skips: int, spread: float, rho: float) -> float:
    """Theorem 3.1's 1 − O(N)·exp(−Ω(mρ²)) with its constants: 1 − 2N·exp(−2·(ρ·ln 2)²/ln(1 + spread)), at least 0.

    ‖h_i‖² is a product of many factors near 1, so that its logarithm is nearly normal with variance ln(1 + spread), and
    ln(1+ρ) ≥ ρ·ln 2. As the spread is about N·const/m, the constant in Ω falls as 1/N.

    >>> band_probability(6, 1e-4, 0.5) > 0.999
    True
    """
    check_rho(rho)
    exponent = 2 * (rho * math.log(2)) ** 2 / math.log1p(spread)
    return max(0.0, 1 - 2 * num_skips * math.exp(-exponent))


def gradient_norm(kappas: Sequence[float], index: int, *, gain: float = KAIMING_GAIN) -> float:
    """E‖∇_W⟨v, h_0⟩‖²/(‖v‖²·‖x‖²) = Σ_{j≥i} g^{2j−1} κ_j² + g^{2N}, W any matrix of the blocks a_i and b_i.

    v is a direction that does not depend on the network; i = N + 1 stands for the middle block.

    >>> gradient_norm([1.0, 0.5], 2, gain=1.0)
    1.25
    """
    count = len(kappas)
    if not 1 <= index <= count + 1:
        raise ValueError(f"blocks are counted from 1 to {count + 1} (the middle), got {index}")
    return sum(gain ** (2 * j - 1) * kappas[j - 1] ** 2 for j in range(index, count + 1)) + gain ** (2 * count)


def robustness_bound(kappas: Sequence[float], gain: float, middle: float) -> float:
    """Theorem 3.4: ‖UNet(x+δ) − UNet(x)‖ ≤ ‖δ‖·(Σ_i κ_i·M_0^i + c_0), with c_0 = M_0^N·L_0.

    `gain` is M_0, `middle` the Lipschitz constant L_0 of f_N. Paper: M_0 = max ‖b_i∘a_i‖; here: max Lip(b_i)·Lip(a_i),
    because what lies between a_i and b_i can turn the one's small directions into the other's large ones.

    >>> robustness_bound([1.0, 0.5], 2.0, 1.0)
    8.0
    """
    return sum(kappa * gain**i for i, kappa in enumerate(kappas, start=1)) + gain ** len(kappas) * middle


def robustness_order(
    method: Literal["none", "uniform", "cs"], num_skips: int, gain: float, kappa: float = 1.0
) -> float:
    """What Theorem 3.4's sum grows like: N·M_0^N, κ·M_0^N with the same κ everywhere, M_0·(κM_0)^{N−1} with CS.

    >>> robustness_order("cs", 6, 2.0, 0.5) / robustness_order("uniform", 6, 2.0, 0.5) == 0.5**4
    True
    """
    orders = {
        "none": num_skips * gain**num_skips,
        "uniform": kappa * gain**num_skips,
        "cs": gain * (kappa * gain) ** (num_skips - 1),
    }
    if method not in orders:
        raise ValueError(f"method must be one of {', '.join(orders)}, got {method!r}")
    return orders[method]


def sum_of_squares(num_skips: int, kappa: float, factors: Sequence[float] = ()) -> float:
    """Σ_j κ_j² of CS: 1 + κ² + … + κ^{2(N−1)}, between 1 and N (Section 4.1).

    `factors` are what the network itself multiplies its skips by, outermost first, if it does; they count as well.

    >>> sum_of_squares(3, 0.5)
    1.3125
    """
    return sum(kappa ** (2 * j) * (factors[j] ** 2 if factors else 1) for j in range(num_skips))


def check_index(kappas: Sequence[float], index: int) -> None:
    if not 0 <= index <= len(kappas):
        raise ValueError(f"index must lie in 0 … {len(kappas)}, got {index}")


def check_rho(rho: float) -> None:
    if not 0 < rho <= 1:
        raise ValueError(f"rho must lie in (0, 1], got {rho}")
