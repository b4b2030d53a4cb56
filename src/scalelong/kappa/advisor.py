"""The κ advisor: what κ the user's own data, schedule and network ask for (Section 4.1 and Theorem 3.4)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

from ..diffusion import DiffusionProcess, Prediction, Schedule, noise_predictor
from ..diffusion.samplers import Predictor
from ..skips import SkipSite, constant_coefficients, find_skips, surviving_share
from ..skips.readers import MOSTLY
from ..theory.input_norms import InputNorms, measure_inputs
from ..theory.laws import sum_of_squares
from .block_gain import BlockGain, measure_gain

PAPER_LIMIT, PAPER_SHARE = 5.0, 0.97
"""Section 4.1: Σκ_j² should stay below 5, because more than 97 % of the ratios ‖ε‖²/‖x_t‖² do."""

LOWEST = 0.5
"""The smallest κ that the paper considers: coefficients near 0 would leave a network without its skips."""

# The block gain is measured at so many noised images.
GAIN_IMAGES = 2

NO_LOWER_END = (
    " Σκ_j² is never below 1, so the targets set no lower end; without its skips a network learns less, and the paper "
    f"considers no κ below {LOWEST}."
)

# Values of κ that differ by less do the same.
DECIMALS = 2


@dataclass(frozen=True)
class KappaBand:
    """The κ of CS whose Σκ_j² are two targets; 0 where even κ → 0 has more, 1 where κ = 1 has less."""

    low: float
    high: float

    def __contains__(self, kappa: float) -> bool:
        return self.low <= kappa <= self.high


def kappa_band(num_skips: int, low: float = 1.22, high: float = PAPER_LIMIT) -> KappaBand:
    """The κ between which low ≤ Σ_j κ^{2(j−1)} ≤ high for N skips: exact, where the paper rounds to [0.5, 0.95].

    >>> band = kappa_band(6, 1.22, 5)
    >>> round(band.low, 3), round(band.high, 3)
    (0.425, 0.963)
    """
    if num_skips < 1 or not 0 < low <= high:
        raise ValueError(f"needs num_skips ≥ 1 and 0 < low ≤ high, got {num_skips}, {low} and {high}")
    return KappaBand(solve_kappa(num_skips, low), solve_kappa(num_skips, high))


def solve_kappa(num_skips: int, total: float) -> float:
    """The κ in [0, 1] with Σ_{j<N} κ^{2j} = total, by bisection to the last bit; the nearer end if there is none."""
    if total <= 1 or total >= num_skips:
        return 0.0 if total <= 1 else 1.0
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if sum_of_squares(num_skips, middle) < total else (low, middle)
    return middle


@dataclass(frozen=True)
class KappaAdvice:
    """One value of κ for CS, the band it comes from, and why."""

    kappa: float
    where: str
    """"input" or "after-norm", as `scale_skips` takes it."""
    band: KappaBand
    num_skips: int
    low: float
    """The lower target of Σκ_j²: the ratio of means."""
    high: float
    """The upper target: what 97 % of the ratios stay below."""
    norms: InputNorms
    gain: BlockGain
    surviving: float
    """The share of the scaling that gets past the norms which read the skips; 1 where there are none."""
    reasons: tuple[str, ...]

    def summary(self) -> dict[str, Any]:
        """All but the numbers of single images, for JSON: what `scalelong kappa --json` prints."""
        norms, gain = self.norms, self.gain
        return {
            "kappa": self.kappa,
            "where": self.where,
            "band": [self.band.low, self.band.high],
            "num_skips": self.num_skips,
            "sum_of_squares": [self.low, self.high],
            "ratio_of_means": norms.ratio_of_means,
            "mean_of_ratios": norms.mean_of_ratios,
            "share_below_5": norms.share_below(PAPER_LIMIT),
            "lemma_3_2": norms.lemma,
            "images": len(norms.inputs),
            "block_gain": None if math.isnan(gain.gain) else gain.gain,
            "path_gains": gain.path_gains,
            "largest_kappa": gain.largest_kappa,
            "surviving": self.surviving,
            "reasons": list(self.reasons),
        }


def suggest_kappa(
    model: nn.Module,
    data: Tensor | Iterable[Tensor],
    schedule: Schedule,
    *,
    prediction: Prediction = "epsilon",
    predict: Predictor | None = None,
    sites: list[SkipSite] | None = None,
    seed: int = 0,
) -> KappaAdvice:
    """Measure the user's data and network, and recommend κ.

    `data` are images in [−1, 1] (or latents), of shape (count, …), or batches of them; `predict(x, t)` calls the model
    where `model(x, t)` would not do. The model should be as it is before training; it is left as it was.
    """
    images = data if isinstance(data, Tensor) else torch.cat(list(data))
    sites, generator = sites or find_skips(model), Generator().manual_seed(seed)
    norms = measure_inputs(images, schedule, prediction=prediction, generator=generator)
    process = DiffusionProcess(schedule, prediction)
    predict = predict or noise_predictor(model)
    gain = gain_on(model, predict, images[:GAIN_IMAGES], process, sites, generator)
    return advise(model, sites, norms, gain)


def gain_on(
    model: nn.Module,
    predict: Predictor,
    images: Tensor,
    process: DiffusionProcess,
    sites: list[SkipSite],
    generator: Generator,
) -> BlockGain:
    """The block gain at noised images of times that are spread over the schedule. Shape: (B, …)."""
    like = next(model.parameters())
    times = process.stratified_times(len(images), generator)
    noise = torch.randn(images.shape, generator=generator)
    x = process.add_noise(images.cpu(), noise, times).to(like)
    t = process.model_time(times).to(like.device).repeat(len(sites))
    return measure_gain(model, lambda x: predict(x, t), x, sites, generator=generator)


def advise(model: nn.Module, sites: list[SkipSite], norms: InputNorms, gain: BlockGain) -> KappaAdvice:
    """The recommendation from what was measured."""
    count, low = len(sites), norms.ratio_of_means
    high = max(low, norms.quantile(PAPER_SHARE))
    band = kappa_band(count, low, high)
    kappa = choose(band, gain, count)
    surviving = surviving_scaling(model, sites, kappa)
    where = "after-norm" if surviving < MOSTLY and all(site.readers and site.joined for site in sites) else "input"
    reasons = (
        about_inputs(norms, low, high),
        about_band(band, low, high, count),
        about_gain(gain, kappa, band),
        *about_absorption(surviving, where, kappa),
    )
    return KappaAdvice(kappa, where, band, count, low, high, norms, gain, surviving, reasons)


def choose(band: KappaBand, gain: BlockGain, num_skips: int) -> float:
    """The middle of the band, or less where the block gain asks for it, but not below the band, nor the paper's lowest.

    A band without a lower end has no middle worth taking: its upper end then stands for it.
    """
    if num_skips == 1:
        return 1.0
    middle, least = ((band.low + band.high) / 2, band.low) if band.low > 0 else (max(band.high, LOWEST), LOWEST)
    return round(max(least, min(middle, gain.largest_kappa)), DECIMALS)


def surviving_scaling(model: nn.Module, sites: list[SkipSite], kappa: float) -> float:
    """The share of CS that the norms let through: the median over the skips that are scaled, 1 if none is absorbed."""
    constants = constant_coefficients(max(site.index for site in sites), kappa).tolist()
    absorbed = [site for site in sites if site.absorbed and constants[site.index - 1] != 1]
    shares = [surviving_share(model, site, constants[site.index - 1]) for site in absorbed]
    return statistics.median(shares) if shares else 1.0


def about_inputs(norms: InputNorms, low: float, high: float) -> str:
    target = {"epsilon": "ε", "x0": "x_0", "v": "v"}[norms.prediction]
    return (
        f"‖{target}‖²/‖x_t‖² over {len(norms.inputs):,} noised images: ratio of means {low:.3g}, mean of ratios "
        f"{norms.mean_of_ratios:.3g}, {norms.share_below(PAPER_LIMIT):.1%} below {PAPER_LIMIT:g}, {PAPER_SHARE:.0%} "
        f"below {high:.3g}; Lemma 3.2, for uniform data, says {norms.lemma:.4g}."
    )


def about_band(band: KappaBand, low: float, high: float, num_skips: int) -> str:
    if num_skips == 1:
        return "With one skip CS leaves it as it is, whatever κ: consider uniform scaling or LS."
    text = f"The output matches the target's size where Σκ_j² lies between {low:.3g} and {high:.3g}: with N = "
    text += f"{num_skips} skips, κ from {band.low:.3f} to {band.high:.3f}."
    return text + (NO_LOWER_END if band.low == 0 else "")


def about_gain(gain: BlockGain, kappa: float, band: KappaBand) -> str:
    size = gain.gain
    if math.isnan(size):
        return "The block gain cannot be seen, because the last layer starts at zero: it sets no limit here."
    text = f"Block gain M_0 = {size:.3g} (Jacobians of the paths through each skip): "
    if size <= 1 or len(gain.path_gains) == 1:
        return text + "every κ ≤ 1 keeps Theorem 3.4's bound from growing with N."
    text += f"κ ≤ 1/M_0 = {gain.largest_kappa:.3f} keeps κ·M_0, and with it Theorem 3.4's bound, from growing with N"
    if gain.largest_kappa < band.low:
        return text + f", which the band does not reach; κ = {kappa} is its lower end."
    return text + "."


def about_absorption(surviving: float, where: str, kappa: float) -> list[str]:
    if surviving >= MOSTLY:
        return []
    text = (
        f"The norms that read the skips cancel constants: {surviving:.1%} of κ = {kappa} would survive them (median), "
        "the rest acts only through the shortcut beside the norm. "
    )
    use = "Scale after the norm (scaling.where=after-norm), or use LS." if where == "after-norm" else "Use LS."
    return [text + use]
