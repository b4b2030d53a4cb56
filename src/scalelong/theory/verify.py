"""Numerical verification of the paper's results on the UNet of Eq. 3: exact MLP blocks, Kaiming weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import torch
from torch import Generator, Tensor

from . import laws
from .input_norms import InputNorms
from .laws import KAIMING_GAIN
from .unet import feature_norms, gradient_norms, lipschitz, output_changes, sample_batches

CONFIDENCE = 0.99
WIDEST = 0.05
"""The largest half-width that the interval around a measured mean may have, as a share of the law."""

METHODS = {"κ = 1": lambda i: 1.0, "κ = 1/√2": lambda i: math.sqrt(0.5), "CS 0.7": lambda i: 0.7**i}


@dataclass(frozen=True)
class Setting:
    """Coefficients for any N, and the blocks' gain."""

    method: str
    gain: float = KAIMING_GAIN

    def kappas(self, num_skips: int) -> list[float]:
        return [METHODS[self.method](i) for i in range(num_skips)]

    def at(self, num_skips: int, width: int) -> str:
        gain = "" if self.gain == KAIMING_GAIN else f", gain {self.gain:g}"
        return f"N={num_skips}, m={width}, {self.method}{gain}"


KAIMING = tuple(Setting(method) for method in METHODS)
UNIT_GAIN = tuple(Setting(method, gain=1.0) for method in METHODS)
SETTINGS = (*KAIMING, *UNIT_GAIN)


@dataclass(frozen=True)
class Sizes:
    """How many networks of which sizes are sampled. Pairs are (N, m), triples (N, m, networks)."""

    forward: tuple[tuple[int, int], ...]
    band: tuple[tuple[int, int, int], ...]
    gradient: tuple[tuple[int, int, int], ...]
    robustness: tuple[tuple[int, int, int], ...]


QUICK = Sizes(
    forward=((1, 64), (2, 64), (4, 64)),
    band=tuple((n, m, 1000) for n in (1, 2) for m in (32, 64, 128)),
    gradient=((2, 64, 3500),),
    robustness=((2, 16, 1000), (4, 16, 1000)),
)
FULL = Sizes(
    forward=((2, 64), (2, 128), (4, 128), (6, 64), (6, 128), (12, 128)),
    band=tuple((n, m, 2000) for n in (1, 2, 6) for m in (32, 64, 128, 256)),
    gradient=((2, 64, 5000), (4, 64, 12_000)),
    robustness=((2, 32, 3000), (4, 32, 3000), (6, 32, 3000)),
)
RHOS = (0.5, 0.8)


@dataclass(frozen=True)
class Check:
    """One row: a law, where it was checked, what it says, what was measured, and the interval's half-width."""

    law: str
    where: str
    expected: float
    measured: float
    half_width: float | None
    """As a share of what is expected; None where the row is not about a mean."""
    passed: bool
    note: str = ""


@dataclass
class Verification:
    """All checks, and the curves that the figures show."""

    checks: list[Check] = field(default_factory=list)
    forward: list[tuple[int, int, Setting, Check]] = field(default_factory=list)
    """N, m, setting, and the check of ‖h_0‖²/‖x‖²."""
    outside: list[tuple[int, int, float, float, float]] = field(default_factory=list)
    """N, m, ρ, share of networks outside the band, stated share."""
    gradient: list[tuple[int, Setting, int, float, float, float]] = field(default_factory=list)
    """N, setting, block, independent, denoising, law."""
    looseness: list[tuple[int, Setting, Tensor]] = field(default_factory=list)
    """N, setting, bound over measured of every network."""


def verify_theory(sizes: Sizes = FULL, *, seed: int = 0) -> Verification:
    """Verify Theorems 3.1, 3.3 and 3.4 in the sharper form on networks sampled from the seed."""
    generator, found = Generator().manual_seed(seed), Verification()
    for verify in (verify_features, verify_band, verify_gradients, verify_robustness):
        verify(sizes, found, generator)
    return found


def verify_features(sizes: Sizes, found: Verification, generator: Generator) -> None:
    """Theorem 3.1, sharper: the mean of ‖h_i‖² is the law, of the output and of the middle of the decoder."""
    z = simultaneous_z(len(sizes.forward) * (len(SETTINGS) + len(KAIMING)))
    for num_skips, width in sizes.forward:
        spreads = [laws.feature_spread(s.kappas(num_skips), width=width, gain=s.gain) for s in SETTINGS]
        # As many networks as make the interval a little narrower than ±5 %.
        count = math.ceil(max(spreads) * (z / (0.96 * WIDEST)) ** 2)
        means = mean_feature_norms(num_skips, width, count, generator)
        for column, setting in enumerate(SETTINGS):
            indices = (0, (num_skips + 1) // 2) if setting in KAIMING else (0,)
            numbers = [(index, means[index, column].item(), z / count**0.5) for index in indices]
            checks = [check_feature(num_skips, width, setting, *one) for one in numbers]
            found.forward.append((num_skips, width, setting, checks[0]))
            found.checks += checks


def mean_feature_norms(num_skips: int, width: int, count: int, generator: Generator) -> Tensor:
    """The mean of ‖h_i‖²/‖x‖², all settings on the same networks. Shape: (N+1, settings)."""
    scale = torch.tensor([math.sqrt(setting.gain / KAIMING_GAIN) for setting in SETTINGS])
    total = torch.zeros(num_skips + 1, len(SETTINGS), dtype=torch.float64)
    for networks in sample_batches(count, width, num_skips, generator):
        total += feature_norms(networks, coefficients(SETTINGS, num_skips), generator, scale).sum(0)
    return total / count


def check_feature(num_skips: int, width: int, setting: Setting, index: int, mean: float, z_per_root: float) -> Check:
    """Whether the law lies in the interval around the mean; `z_per_root` is z/√(number of networks).

    The interval's width comes from the exact variance: a heavy tail makes that of a sample too small.
    """
    kappas = setting.kappas(num_skips)
    law = laws.feature_norm(kappas, index, gain=setting.gain)
    half = z_per_root * math.sqrt(laws.feature_spread(kappas, index, width=width, gain=setting.gain))
    return check_mean(f"E‖h_{index}‖²/‖x‖²", setting.at(num_skips, width), law, mean, half)


def verify_band(sizes: Sizes, found: Verification, generator: Generator) -> None:
    """Theorem 3.1's band: the share of networks outside is at most what is stated, wherever that is below 1."""
    z = simultaneous_z(len(sizes.band) * len(RHOS))
    for num_skips, width, count in sizes.band:
        kappas, column = KAIMING[0].kappas(num_skips), coefficients(KAIMING[:1], num_skips)
        batches = sample_batches(count, width, num_skips, generator)
        norms = torch.cat([feature_norms(networks, column, generator)[:, 0, 0] for networks in batches])
        for rho in RHOS:
            low, high = laws.feature_band(laws.feature_norm(kappas), rho)
            outside = ((norms < low) | (norms > high)).double().mean().item()
            limit = 1 - laws.band_probability(num_skips, laws.feature_spread(kappas, width=width), rho)
            found.outside.append((num_skips, width, rho, outside, limit))
            if limit < 1:
                where = f"N={num_skips}, m={width}, ρ={rho}"
                found.checks.append(check_share(where, outside, limit, z, count))


def verify_gradients(sizes: Sizes, found: Verification, generator: Generator) -> None:
    """Theorem 3.3, sharper: the mean of ‖∇_W⟨v, h_0⟩‖² is the law for every block."""
    z = simultaneous_z(sum(num_skips + 1 for num_skips, _, _ in sizes.gradient) * len(KAIMING))
    for num_skips, width, count in sizes.gradient:
        for setting in KAIMING:
            kappas, batches = setting.kappas(num_skips), sample_batches(count, width, num_skips, generator)
            norms = [gradient_norms(networks, coefficients([setting], num_skips), generator) for networks in batches]
            independent, denoising = (torch.cat(parts).unbind(1) for parts in zip(*norms, strict=True))
            for block, values in enumerate(independent, start=1):
                law, loss = laws.gradient_norm(kappas, block), denoising[block - 1].mean().item()
                found.gradient.append((num_skips, setting, block, values.mean().item(), loss, law))
                note = f"the denoising loss has {loss / law:.1f} times that"
                found.checks.append(check_gradient(setting.at(num_skips, width), block, values, law, z, note))


def verify_robustness(sizes: Sizes, found: Verification, generator: Generator) -> None:
    """Theorem 3.4: no network changes its output by more than the bound."""
    for num_skips, width, count in sizes.robustness:
        kappas = coefficients(KAIMING, num_skips)
        batches = sample_batches(count, width, num_skips, generator)
        ratios = torch.cat([bound_ratios(networks, kappas, generator) for networks in batches])
        for setting, looseness in zip(KAIMING, ratios.T, strict=True):
            found.looseness.append((num_skips, setting, looseness))
            violations, where = int((looseness < 1).sum()), setting.at(num_skips, width)
            note = f"in {count} networks; the bound is {looseness.median():.1e} times the change (median)"
            found.checks.append(Check("robustness bound violated", where, 0, violations, None, violations == 0, note))


def bound_ratios(networks: Tensor, kappas: Tensor, generator: Generator) -> Tensor:
    """Theorem 3.4's bound over the largest change found, for each network and setting. Shape: (networks, K)."""
    count, blocks = len(kappas), lipschitz(networks)
    gains, middles = (blocks[:count] * blocks[count + 1 :]).amax(0).tolist(), blocks[count].tolist()
    changes = output_changes(networks, kappas, steps=6, size=1e-2, generator=generator)
    pairs, columns = zip(gains, middles, strict=True), kappas.T.tolist()
    bounds = [[laws.robustness_bound(column, gain, middle) for column in columns] for gain, middle in pairs]
    return torch.tensor(bounds, dtype=torch.float64) / changes


def verify_inputs(datasets: dict[str, InputNorms]) -> list[Check]:
    """E‖x_t‖²/m against Lemma 3.2 for uniform data, and with the data's own E x_0² for all."""
    z, checks = simultaneous_z(len(datasets)), []
    for name, norms in datasets.items():
        lemma = laws.input_norm(norms.mean_alpha_bar, 1)
        moment = 1 / 3 if name == "uniform" else norms.second_moment
        law = laws.input_norm(norms.mean_alpha_bar, 1, second_moment=moment)
        half = z * norms.inputs.std().item() / len(norms.inputs) ** 0.5 / law
        note = "Lemma 3.2" if name == "uniform" else f"E x_0² = {moment:.3f}; Lemma 3.2 ({lemma:.4f}) assumes 1/3"
        checks.append(check_mean("E‖x_t‖²/m", f"{name}, linear schedule", law, norms.inputs.mean().item(), half, note))
    return checks


def simultaneous_z(rows: int) -> float:
    """How many standard errors contain the means of so many rows at once, with 99 % (Bonferroni)."""
    return NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2 / rows)


def coefficients(settings: Sequence[Setting], num_skips: int) -> Tensor:
    """The settings as columns of one product. Shape: (N, settings)."""
    return torch.tensor([setting.kappas(num_skips) for setting in settings]).T


def check_mean(law: str, where: str, expected: float, mean: float, half: float, note: str = "") -> Check:
    """Whether what is expected lies in a narrow interval around a mean; `half` is a share of what is expected."""
    return Check(law, where, expected, mean, half, abs(mean / expected - 1) <= half <= WIDEST, note)


def check_share(where: str, outside: float, limit: float, z: float, count: int) -> Check:
    """Whether the share among `count` networks is at most the limit, within its error."""
    error = z * math.sqrt(limit * (1 - limit) / count)
    return Check("share outside (1±ρ)² ≤", where, limit, outside, None, outside <= limit + error)


def check_gradient(where: str, block: int, values: Tensor, law: float, z: float, note: str) -> Check:
    half = z * values.std().item() / math.sqrt(len(values)) / law
    return check_mean(f"E‖∇W_{block}‖²/‖x‖²", where, law, values.mean().item(), half, note)
