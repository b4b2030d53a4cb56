"""Numerical verification of the paper's results on the UNet of Eq. 3: exact MLP blocks, Kaiming weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import torch
from torch import Generator, Tensor

from .draws import batches, draw_networks, feature_norms, gradient_norms, output_changes, pair_gains
from .laws import KAIMING_GAIN, band_probability, feature_band, feature_norm, feature_spread, gradient_norm
from .laws import robustness_bound as theorem_3_4

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
    """How much is drawn. Pairs are (N, m)."""

    forward: tuple[tuple[int, int], ...]
    band: tuple[tuple[int, int], ...]
    band_draws: int
    gradient: tuple[tuple[int, int, int], ...]
    """(N, m, draws)."""
    robustness: tuple[tuple[int, int, int], ...]


QUICK = Sizes(
    forward=((1, 64), (2, 64), (4, 64)),
    band=tuple((n, m) for n in (1, 2) for m in (32, 64, 128)),
    band_draws=1000,
    gradient=((2, 64, 3500),),
    robustness=((2, 16, 1000), (4, 16, 1000)),
)
FULL = Sizes(
    forward=((2, 64), (2, 128), (4, 128), (6, 64), (6, 128), (12, 128)),
    band=tuple((n, m) for n in (1, 2, 6) for m in (32, 64, 128, 256)),
    band_draws=2000,
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
    """N, m, ρ, share of draws outside the band, stated share."""
    gradient: list[tuple[int, Setting, int, float, float, float]] = field(default_factory=list)
    """N, setting, block, independent, denoising, law."""
    looseness: list[tuple[int, Setting, Tensor]] = field(default_factory=list)
    """N, setting, bound over measured of every draw."""


@dataclass(frozen=True)
class Verification:
    """All checks, and the curves that the figures show."""

    checks: list[Check]
    curves: Curves


def verify_theory(sizes: Sizes = FULL, *, seed: int = 0) -> Verification:
    """Verify Theorems 3.1, 3.3 and 3.4 in the sharper form on networks drawn from the seed."""
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


def planned_draws(spread: float, z: float) -> int:
    """As many draws as make the interval a little narrower than ±5 %."""
    return math.ceil(spread * (z / (0.96 * WIDEST)) ** 2)


def verify_features(sizes: Sizes, curves: Curves, generator: Generator) -> list[Check]:
    """Theorem 3.1, sharper: the mean of ‖h_i‖² is the law, of the output and of the middle of the decoder."""
    settings = (*KAIMING, *UNIT_GAIN)
    z = simultaneous_z(len(sizes.forward) * (len(settings) + len(KAIMING)))
    checks = []
    for num_skips, width in sizes.forward:
        spreads = [feature_spread(s.kappas(num_skips), width=width, gain=s.gain) for s in settings]
        draws = planned_draws(max(spreads), z)
        means = mean_feature_norms(num_skips, width, settings, draws, generator)
        for column, setting in enumerate(settings):
            for index in (0,) if setting in UNIT_GAIN else (0, (num_skips + 1) // 2):
                check = check_feature(num_skips, width, setting, index, means[index, column].item(), z / draws**0.5)
                checks.append(check)
                if index == 0:
                    half = check.half_width or 0.0
                    curves.forward.append((num_skips, width, setting, check.measured, check.expected, half))
    return checks


def mean_feature_norms(
    num_skips: int, width: int, settings: Sequence[Setting], draws: int, generator: Generator
) -> Tensor:
    """The mean of ‖h_i‖²/‖x‖² over draws, all settings on the same networks. Shape: (N+1, settings)."""
    kappas, scale = columns(settings, num_skips)
    total = torch.zeros(num_skips + 1, len(settings), dtype=torch.float64)
    for count in batches(draws, width, num_skips):
        networks = draw_networks(count, width, num_skips, generator=generator)
        total += feature_norms(networks, kappas, generator, scale).sum(0)
    return total / draws


def columns(settings: Sequence[Setting], num_skips: int) -> tuple[Tensor, Tensor]:
    """The settings as columns of one product. Shape: (N, K), (K,)."""
    kappas = torch.tensor([setting.kappas(num_skips) for setting in settings]).T
    return kappas, torch.tensor([math.sqrt(setting.gain / KAIMING_GAIN) for setting in settings])


def check_feature(num_skips: int, width: int, setting: Setting, index: int, mean: float, z_per_root: float) -> Check:
    """Whether the law lies in the interval around the mean; `z_per_root` is z/√draws.

    The interval's width comes from the exact variance: a heavy tail makes that of a sample too small.
    """
    kappas = setting.kappas(num_skips)
    law = feature_norm(kappas, index, gain=setting.gain)
    half = z_per_root * math.sqrt(feature_spread(kappas, index, width=width, gain=setting.gain))
    inside = abs(mean / law - 1) <= half <= WIDEST
    return Check(f"E‖h_{index}‖²/‖x‖²", f"N={num_skips}, m={width}, {setting.name}", law, mean, half, inside)


def verify_band(sizes: Sizes, curves: Curves, generator: Generator) -> list[Check]:
    """Theorem 3.1's band: the share of draws outside is at most what is stated, wherever that is below 1."""
    setting, checks = KAIMING[0], []
    stated = {size: spread_at(size, setting) for size in sizes.band}
    z = simultaneous_z(len(sizes.band) * len(RHOS))
    for (num_skips, width), spread in stated.items():
        norms = output_norms(num_skips, width, setting, sizes.band_draws, generator)
        for rho in RHOS:
            low, high = feature_band(feature_norm(setting.kappas(num_skips)), rho)
            outside = ((norms < low) | (norms > high)).double().mean().item()
            limit = 1 - band_probability(num_skips, spread, rho)
            curves.outside.append((num_skips, width, rho, outside, limit))
            if limit < 1:
                checks.append(check_share(num_skips, width, rho, outside, limit, z, sizes.band_draws))
    return checks


def spread_at(size: tuple[int, int], setting: Setting) -> float:
    return feature_spread(setting.kappas(size[0]), width=size[1])


def output_norms(num_skips: int, width: int, setting: Setting, draws: int, generator: Generator) -> Tensor:
    """‖h_0‖²/‖x‖² of every draw. Shape: (draws,)."""
    kappas, _ = columns([setting], num_skips)
    sizes = batches(draws, width, num_skips)
    drawn = (draw_networks(count, width, num_skips, generator=generator) for count in sizes)
    return torch.cat([feature_norms(networks, kappas, generator)[:, 0, 0] for networks in drawn])


def check_share(num_skips: int, width: int, rho: float, outside: float, limit: float, z: float, draws: int) -> Check:
    error = z * math.sqrt(limit * (1 - limit) / draws)
    where = f"N={num_skips}, m={width}, ρ={rho}"
    return Check("share outside (1±ρ)² ≤", where, limit, outside, None, outside <= limit + error)


def verify_gradients(sizes: Sizes, curves: Curves, generator: Generator) -> list[Check]:
    """Theorem 3.3, sharper: the mean of ‖∇_W⟨v, h_0⟩‖² is the law for every block."""
    z = simultaneous_z(sum(num_skips + 1 for num_skips, _, _ in sizes.gradient) * len(KAIMING))
    checks = []
    for num_skips, width, draws in sizes.gradient:
        for setting in KAIMING:
            independent, denoising = gradients(num_skips, width, setting, draws, generator)
            for block in range(1, num_skips + 2):
                values, law = independent[:, block - 1], gradient_norm(setting.kappas(num_skips), block)
                loss = denoising[:, block - 1].mean().item()
                curves.gradient.append((num_skips, setting, block, values.mean().item(), loss, law))
                where = f"N={num_skips}, m={width}, {setting.name}"
                note = f"the denoising loss has {loss / law:.1f} times that"
                checks.append(check_gradient(where, block, values, law, z, note))
    return checks


def gradients(num_skips: int, width: int, setting: Setting, draws: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Gradient norms of every draw, for an independent direction and for the denoising loss. Shape: (draws, N+1)."""
    kappas = setting.kappas(num_skips)
    sizes = batches(draws, width, num_skips)
    drawn = (draw_networks(count, width, num_skips, generator=generator) for count in sizes)
    found = [gradient_norms(networks, kappas, generator) for networks in drawn]
    return torch.cat([part.independent for part in found]), torch.cat([part.denoising for part in found])


def check_gradient(where: str, block: int, values: Tensor, law: float, z: float, note: str) -> Check:
    mean, half = values.mean().item(), z * values.std().item() / math.sqrt(len(values)) / law
    inside = abs(mean / law - 1) <= half <= WIDEST
    return Check(f"E‖∇W_{block}‖²/‖x‖²", where, law, mean, half, inside, note)


def verify_robustness(sizes: Sizes, curves: Curves, generator: Generator) -> list[Check]:
    """Theorem 3.4: no draw changes its output by more than the bound."""
    checks = []
    for num_skips, width, draws in sizes.robustness:
        kappas, _ = columns(KAIMING, num_skips)
        ratios = torch.cat(list(bound_ratios(num_skips, width, draws, kappas, generator)))
        for column, setting in enumerate(KAIMING):
            looseness = ratios[:, column]
            curves.looseness.append((num_skips, setting, looseness))
            violations = int((looseness < 1).sum())
            note = f"in {draws} draws; the bound is {looseness.median():.1e} times the change (median)"
            where = f"N={num_skips}, m={width}, {setting.name}"
            checks.append(Check("robustness bound violated", where, 0, violations, None, violations == 0, note))
    return checks


def bound_ratios(num_skips: int, width: int, draws: int, kappas: Tensor, generator: Generator) -> Iterator[Tensor]:
    """Theorem 3.4's bound over the largest change found, for each draw and setting. Shape: (draws, K) in batches."""
    for count in batches(draws, width, num_skips):
        networks = draw_networks(count, width, num_skips, generator=generator)
        gains, middles = pair_gains(networks)
        changes = output_changes(networks, kappas, steps=6, size=1e-2, generator=generator)
        pairs = list(zip(gains.tolist(), middles.tolist(), strict=True))
        bounds = [[theorem_3_4(column, gain, middle) for column in kappas.T.tolist()] for gain, middle in pairs]
        yield torch.tensor(bounds, dtype=torch.float64) / changes
