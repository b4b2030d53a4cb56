"""Numerical verification of the paper's results on the UNet of Eq. 3: exact MLP blocks, Kaiming weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import torch
from torch import Generator, Tensor

from .laws import (
    KAIMING_GAIN,
    band_probability,
    feature_band,
    feature_norm,
    feature_spread,
    gradient_norm,
    robustness_bound,
)
from .networks import Networks, feature_norms, gradient_norms, output_changes, pair_gains, sample_batches

CONFIDENCE = 0.99
WIDEST = 0.05
"""The largest half-width that the interval around a measured mean may have, as a share of the law."""


@dataclass(frozen=True)
class Setting:
    """Coefficients for any N, and the blocks' gain."""

    name: str
    method: str
    gain: float = KAIMING_GAIN

    def kappas(self, num_skips: int) -> list[float]:
        rules = {"κ = 1": lambda i: 1.0, "κ = 1/√2": lambda i: math.sqrt(0.5), "CS 0.7": lambda i: 0.7**i}
        return [rules[self.method](i) for i in range(num_skips)]


METHODS = ("κ = 1", "κ = 1/√2", "CS 0.7")
KAIMING = tuple(Setting(method, method) for method in METHODS)
UNIT_GAIN = tuple(Setting(f"{method}, gain 1", method, gain=1.0) for method in METHODS)


@dataclass(frozen=True)
class Sizes:
    """How many networks of which sizes are sampled. Pairs are (N, m), triples (N, m, networks)."""

    forward: tuple[tuple[int, int], ...]
    band: tuple[tuple[int, int], ...]
    band_networks: int
    gradient: tuple[tuple[int, int, int], ...]
    robustness: tuple[tuple[int, int, int], ...]


QUICK = Sizes(
    forward=((1, 64), (2, 64), (4, 64)),
    band=tuple((n, m) for n in (1, 2) for m in (32, 64, 128)),
    band_networks=1000,
    gradient=((2, 64, 3500),),
    robustness=((2, 16, 1000), (4, 16, 1000)),
)
FULL = Sizes(
    forward=((2, 64), (2, 128), (4, 128), (6, 64), (6, 128), (12, 128)),
    band=tuple((n, m) for n in (1, 2, 6) for m in (32, 64, 128, 256)),
    band_networks=2000,
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
class Curves:
    """What the figures show besides the checks."""

    forward: list[tuple[int, int, Setting, float, float, float]] = field(default_factory=list)
    """N, m, setting, measured mean of ‖h_0‖²/‖x‖², its law, half-width."""
    outside: list[tuple[int, int, float, float, float]] = field(default_factory=list)
    """N, m, ρ, share of networks outside the band, stated share."""
    gradient: list[tuple[int, Setting, int, float, float, float]] = field(default_factory=list)
    """N, setting, block, independent, denoising, law."""
    looseness: list[tuple[int, Setting, Tensor]] = field(default_factory=list)
    """N, setting, bound over measured of every network."""


@dataclass(frozen=True)
class Verification:
    """All checks, and the curves that the figures show."""

    checks: list[Check]
    curves: Curves


def verify_theory(sizes: Sizes = FULL, *, seed: int = 0) -> Verification:
    """Verify Theorems 3.1, 3.3 and 3.4 in the sharper form on networks sampled from the seed."""
    generator, curves = Generator().manual_seed(seed), Curves()
    checks = [
        *verify_features(sizes, curves, generator),
        *verify_band(sizes, curves, generator),
        *verify_gradients(sizes, curves, generator),
        *verify_robustness(sizes, curves, generator),
    ]
    return Verification(checks, curves)


def simultaneous_z(rows: int) -> float:
    """How many standard errors contain the means of so many rows at once, with 99 % (Bonferroni)."""
    return NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2 / rows)


def verify_features(sizes: Sizes, curves: Curves, generator: Generator) -> list[Check]:
    """Theorem 3.1, sharper: the mean of ‖h_i‖² is the law, of the output and of the middle of the decoder."""
    settings = (*KAIMING, *UNIT_GAIN)
    z = simultaneous_z(len(sizes.forward) * (len(settings) + len(KAIMING)))
    checks = []
    for num_skips, width in sizes.forward:
        spreads = [feature_spread(s.kappas(num_skips), width=width, gain=s.gain) for s in settings]
        # As many networks as make the interval a little narrower than ±5 %.
        count = math.ceil(max(spreads) * (z / (0.96 * WIDEST)) ** 2)
        means = mean_feature_norms(num_skips, width, settings, count, generator)
        for column, setting in enumerate(settings):
            for index in (0,) if setting in UNIT_GAIN else (0, (num_skips + 1) // 2):
                check = check_feature(num_skips, width, setting, index, means[index, column].item(), z / count**0.5)
                checks.append(check)
                if index == 0:
                    half = check.half_width or 0.0
                    curves.forward.append((num_skips, width, setting, check.measured, check.expected, half))
    return checks


def mean_feature_norms(
    num_skips: int, width: int, settings: Sequence[Setting], count: int, generator: Generator
) -> Tensor:
    """The mean of ‖h_i‖²/‖x‖², all settings on the same networks. Shape: (N+1, settings)."""
    kappas = coefficients(settings, num_skips)
    scale = torch.tensor([math.sqrt(setting.gain / KAIMING_GAIN) for setting in settings])
    total = torch.zeros(num_skips + 1, len(settings), dtype=torch.float64)
    for networks in sample_batches(count, width, num_skips, generator):
        total += feature_norms(networks, kappas, generator, scale).sum(0)
    return total / count


def coefficients(settings: Sequence[Setting], num_skips: int) -> Tensor:
    """The settings as columns of one product. Shape: (N, settings)."""
    return torch.tensor([setting.kappas(num_skips) for setting in settings]).T


def check_feature(num_skips: int, width: int, setting: Setting, index: int, mean: float, z_per_root: float) -> Check:
    """Whether the law lies in the interval around the mean; `z_per_root` is z/√(number of networks).

    The interval's width comes from the exact variance: a heavy tail makes that of a sample too small.
    """
    kappas = setting.kappas(num_skips)
    law = feature_norm(kappas, index, gain=setting.gain)
    half = z_per_root * math.sqrt(feature_spread(kappas, index, width=width, gain=setting.gain))
    return check_mean(f"E‖h_{index}‖²/‖x‖²", place(num_skips, width, setting), law, mean, half)


def check_mean(law: str, where: str, expected: float, mean: float, half: float, note: str = "") -> Check:
    """Whether what is expected lies in a narrow interval around a mean; `half` is a share of what is expected."""
    return Check(law, where, expected, mean, half, abs(mean / expected - 1) <= half <= WIDEST, note)


def place(num_skips: int, width: int, setting: Setting) -> str:
    return f"N={num_skips}, m={width}, {setting.name}"


def verify_band(sizes: Sizes, curves: Curves, generator: Generator) -> list[Check]:
    """Theorem 3.1's band: the share of networks outside is at most what is stated, wherever that is below 1."""
    setting, checks = KAIMING[0], []
    z = simultaneous_z(len(sizes.band) * len(RHOS))
    for num_skips, width in sizes.band:
        kappas = setting.kappas(num_skips)
        batches = sample_batches(sizes.band_networks, width, num_skips, generator)
        column = coefficients([setting], num_skips)
        norms = torch.cat([feature_norms(networks, column, generator)[:, 0, 0] for networks in batches])
        for rho in RHOS:
            low, high = feature_band(feature_norm(kappas), rho)
            outside = ((norms < low) | (norms > high)).double().mean().item()
            limit = 1 - band_probability(num_skips, feature_spread(kappas, width=width), rho)
            curves.outside.append((num_skips, width, rho, outside, limit))
            if limit < 1:
                where = f"N={num_skips}, m={width}, ρ={rho}"
                checks.append(check_share(where, outside, limit, z, sizes.band_networks))
    return checks


def check_share(where: str, outside: float, limit: float, z: float, count: int) -> Check:
    """Whether the share among `count` networks is at most the limit, within its error."""
    error = z * math.sqrt(limit * (1 - limit) / count)
    return Check("share outside (1±ρ)² ≤", where, limit, outside, None, outside <= limit + error)


def verify_gradients(sizes: Sizes, curves: Curves, generator: Generator) -> list[Check]:
    """Theorem 3.3, sharper: the mean of ‖∇_W⟨v, h_0⟩‖² is the law for every block."""
    z = simultaneous_z(sum(num_skips + 1 for num_skips, _, _ in sizes.gradient) * len(KAIMING))
    checks = []
    for num_skips, width, count in sizes.gradient:
        for setting in KAIMING:
            kappas, batches = setting.kappas(num_skips), sample_batches(count, width, num_skips, generator)
            norms = [gradient_norms(networks, kappas, generator) for networks in batches]
            independent, denoising = (torch.cat(parts).unbind(1) for parts in zip(*norms, strict=True))
            for block, values in enumerate(independent, start=1):
                law, loss = gradient_norm(kappas, block), denoising[block - 1].mean().item()
                curves.gradient.append((num_skips, setting, block, values.mean().item(), loss, law))
                note = f"the denoising loss has {loss / law:.1f} times that"
                checks.append(check_gradient(place(num_skips, width, setting), block, values, law, z, note))
    return checks


def check_gradient(where: str, block: int, values: Tensor, law: float, z: float, note: str) -> Check:
    half = z * values.std().item() / math.sqrt(len(values)) / law
    return check_mean(f"E‖∇W_{block}‖²/‖x‖²", where, law, values.mean().item(), half, note)


def verify_robustness(sizes: Sizes, curves: Curves, generator: Generator) -> list[Check]:
    """Theorem 3.4: no network changes its output by more than the bound."""
    checks = []
    for num_skips, width, count in sizes.robustness:
        kappas = coefficients(KAIMING, num_skips)
        batches = sample_batches(count, width, num_skips, generator)
        ratios = torch.cat([bound_ratios(networks, kappas, generator) for networks in batches])
        for column, setting in enumerate(KAIMING):
            looseness = ratios[:, column]
            curves.looseness.append((num_skips, setting, looseness))
            violations = int((looseness < 1).sum())
            note = f"in {count} networks; the bound is {looseness.median():.1e} times the change (median)"
            where = place(num_skips, width, setting)
            checks.append(Check("robustness bound violated", where, 0, violations, None, violations == 0, note))
    return checks


def bound_ratios(networks: Networks, kappas: Tensor, generator: Generator) -> Tensor:
    """Theorem 3.4's bound over the largest change found, for each network and setting. Shape: (networks, K)."""
    gains, middles = (values.tolist() for values in pair_gains(networks))
    changes = output_changes(networks, kappas, steps=6, size=1e-2, generator=generator)
    columns = kappas.T.tolist()
    bounds = [
        [robustness_bound(column, gain, middle) for column in columns]
        for gain, middle in zip(gains, middles, strict=True)
    ]
    return torch.tensor(bounds, dtype=torch.float64) / changes
