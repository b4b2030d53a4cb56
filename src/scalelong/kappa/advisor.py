"""The κ advisor: what one's own data, schedule and network, or a recipe's, ask for (Section 4.1, Theorem 3.4)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from ..config import Config, build_process
from ..config.build import known_sites
from ..diffusion import DiffusionProcess, Prediction, Schedule, noise_predictor
from ..diffusion.guidance import Predictor
from ..skips import SkipSite, constant_coefficients, find_skips
from ..skips.readers import MOSTLY, surviving_shares
from ..theory.figures import BLUE, GREEN, GREY, ORANGE, figure
from ..theory.input_norms import InputNorms, measure_inputs
from ..theory.laws import sum_of_squares
from .block_gain import BlockGain, Progress, measure_gain
from .start import GAIN_IMAGES, recipe_start

PAPER_LIMIT, PAPER_SHARE = 5.0, 0.97
"""Section 4.1: Σκ_j² should stay below 5, because more than 97 % of the ratios ‖ε‖²/‖x_t‖² do."""

LOWEST = 0.5
"""The smallest κ that the paper considers: coefficients near 0 would leave a network without its skips."""

SECONDS, TOLERANCE = 10.0, 0.02
"""How long the block gain may take, and how exact it is: κ depends on its (i−1)-th root."""

# Values of κ that differ by less do the same.
DECIMALS = 2


@dataclass(frozen=True)
class KappaBand:
    """The κ of CS whose Σκ_j² are two targets; 0 where even κ → 0 has more, 1 where κ = 1 has less."""

    low: float
    high: float


def kappa_band(
    num_skips: int, low: float = 1.22, high: float = PAPER_LIMIT, factors: Sequence[float] = ()
) -> KappaBand:
    """The κ between which low ≤ Σ_j κ^{2(j−1)} ≤ high for N skips: exact, where the paper rounds to [0.5, 0.95].

    `factors` are those of a network that multiplies its skips by a number of its own, such as 1/√2.

    >>> band = kappa_band(6, 1.22, 5)
    >>> round(band.low, 3), round(band.high, 3)
    (0.425, 0.963)
    """
    if num_skips < 1 or not 0 < low <= high:
        raise ValueError(f"needs num_skips ≥ 1 and 0 < low ≤ high, got {num_skips}, {low} and {high}")
    return KappaBand(solve_kappa(num_skips, low, factors), solve_kappa(num_skips, high, factors))


def solve_kappa(num_skips: int, total: float, factors: Sequence[float] = ()) -> float:
    """The κ in [0, 1] with Σ_{j<N} κ^{2j} = total, by bisection to the last bit; the nearer end if there is none."""
    least, most = (sum_of_squares(num_skips, end, factors) for end in (0, 1))
    if total <= least or total >= most:
        return 0.0 if total <= least else 1.0
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if sum_of_squares(num_skips, middle, factors) < total else (low, middle)
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
    factors: tuple[float, ...] = ()
    """What the network itself multiplies its skips by, outermost first; empty if it does not."""

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
    seconds: float = SECONDS,
    show_band: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> KappaAdvice:
    """Measure the user's data and network, and recommend κ.

    `data` are images in [−1, 1] (or latents), of shape (count, …), or batches of them; `predict(x, t)` calls the model
    where `model(x, t)` would not do. The model should be as it is before training; it is left as it was. The band is
    there at once, and told to `show_band`; the block gain takes about `seconds` at most and tells `progress` its steps.
    """
    images = data if isinstance(data, Tensor) else torch.cat(list(data))
    sites, generator = sites or find_skips(model), Generator().manual_seed(seed)
    norms = measure_inputs(images, schedule, prediction=prediction, generator=generator)
    if show_band is not None:
        low, high = targets_of(norms)
        show_band(about_band(kappa_band(len(sites), low, high, own_factors(sites)), low, high, len(sites)))
    # Noised at times that are spread over the schedule.
    images, process = images[:GAIN_IMAGES].cpu(), DiffusionProcess(schedule, prediction)
    times = process.stratified_times(len(images), generator)
    x = process.add_noise(images, torch.randn(images.shape, generator=generator), times)
    like, predict = next(model.parameters()), predict or noise_predictor(model)
    t = process.model_time(times).to(like.device)

    def call(x: Tensor) -> Tensor:
        return predict(x, t[torch.arange(len(x), device=t.device) % len(t)])

    limits = {"tolerance": TOLERANCE, "seconds": seconds, "progress": progress}
    gain = measure_gain(model, call, x.to(like), sites, generator=generator, **limits)
    return advise(model, sites, norms, gain)


def advise_recipe(
    config: Config,
    *,
    seconds: float = SECONDS,
    show_band: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> KappaAdvice:
    """Measure the recipe's network as it starts, without scaling, on what it would train on, or on stand-ins for it."""
    start = recipe_start(config)
    schedule, prediction = build_process(config.diffusion).schedule, config.diffusion.prediction
    told: dict[str, Any] = {"seconds": seconds, "show_band": show_band, "progress": progress}
    told |= {"prediction": prediction, "predict": start.predict, "sites": known_sites(start.model, config)}
    if show_band is not None and start.stand_in:
        show_band(start.stand_in)
    advice = suggest_kappa(start.model, start.images, schedule, **told)
    return replace(advice, reasons=(*filter(None, [start.stand_in]), *advice.reasons))


def targets_of(norms: InputNorms) -> tuple[float, float]:
    """The lower and the upper target of Σκ_j²."""
    low = norms.ratio_of_means
    return low, max(low, norms.ratios.quantile(PAPER_SHARE).item())


def advise(model: nn.Module, sites: list[SkipSite], norms: InputNorms, gain: BlockGain) -> KappaAdvice:
    """The recommendation from what was measured."""
    count, (low, high), factors = len(sites), targets_of(norms), own_factors(sites)
    band = kappa_band(count, low, high, factors)
    kappa = choose(band, gain, count)
    constants = constant_coefficients(max(site.index for site in sites), kappa).tolist()
    # The median over the skips that are scaled; 1 if no norm absorbs any.
    surviving = statistics.median(surviving_shares(model, sites, constants) or [1.0])
    where = "after-norm" if surviving < MOSTLY and all(site.readers and site.joined for site in sites) else "input"
    reasons = [about_inputs(norms, low, high), about_band(band, low, high, count), about_gain(gain, kappa, band)]
    if factors:
        reasons.append(about_factors(factors))
    if count > 1 and not band.low <= kappa <= band.high:
        reasons.append(
            f"κ = {kappa} lies above this band, all of which is below {LOWEST}: it says how large the output of an "
            "untrained network is beside its target, and not that a network learns with skips so weak."
        )
    if surviving < MOSTLY:
        reasons.append(about_absorption(surviving, where, kappa))
    return KappaAdvice(kappa, where, band, count, low, high, norms, gain, surviving, tuple(reasons), factors)


def own_factors(sites: list[SkipSite]) -> tuple[float, ...]:
    """What the network itself multiplies its skips by, outermost first; empty if it multiplies none."""
    factors = tuple(site.factor for site in sorted(sites, key=lambda site: site.index))
    return () if all(factor == 1 for factor in factors) else factors


def choose(band: KappaBand, gain: BlockGain, num_skips: int) -> float:
    """The middle of the band, or less where the block gain asks for it, but not below the band, nor the paper's lowest.

    A band without a lower end has no middle worth taking: its upper end then stands for it.
    """
    if num_skips == 1:
        return 1.0
    middle, least = ((band.low + band.high) / 2, band.low) if band.low > 0 else (max(band.high, LOWEST), LOWEST)
    wanted = max(least, min(middle, gain.largest_kappa))
    highest, near = (band.high if band.low > 0 else 1.0), (0, 1, -1)
    rounded = (round(wanted + step / 10**DECIMALS, DECIMALS) for step in near)
    # A band may be narrower than the rounding.
    return next((kappa for kappa in rounded if least <= kappa <= highest), wanted)


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
    if band.low > 0:
        return text
    text += " Σκ_j² is never below 1, so the targets set no lower end; without its skips a network learns less, and "
    return text + f"the paper considers no κ below {LOWEST}."


def about_factors(factors: tuple[float, ...]) -> str:
    times, own = sum(factor != 1 for factor in factors), sum_of_squares(len(factors), 1, factors)
    return (
        f"The network multiplies {times} of its skips by a number itself: Σκ_j² counts that, and is {own:.3g} at κ = 1."
    )


def about_gain(gain: BlockGain, kappa: float, band: KappaBand) -> str:
    if not gain.path_gains:
        return f"The block gain was not measured: one step would take about {gain.seconds:.0f} s. It sets no limit."
    if math.isnan(gain.gain):
        return "The block gain cannot be seen, because the last layer starts at zero: it sets no limit here."
    of = (
        "each skip" if gain.skips is None else f"skips {' and '.join(map(str, gain.skips))} only, for the time it takes"
    )
    text = f"Block gain M_0 {'=' if gain.settled else '≥'} {gain.gain:.3g} (Jacobians of the paths through {of}): "
    if gain.gain <= 1 or len(gain.path_gains) == 1:
        return text + "every κ ≤ 1 keeps Theorem 3.4's bound from growing with N."
    text += f"κ ≤ 1/M_0 = {gain.largest_kappa:.3f} keeps κ·M_0, and with it Theorem 3.4's bound, from growing with N"
    reached = gain.largest_kappa >= band.low
    return text + ("." if reached else f", which the band does not reach; κ = {kappa} is its lower end.")


def about_absorption(surviving: float, where: str, kappa: float) -> str:
    use = "Scale after the norm (scaling.where=after-norm), or use LS." if where == "after-norm" else "Use LS."
    return (
        f"The norms that read the skips cancel constants: {surviving:.1%} of κ = {kappa} would survive them (median), "
        f"the rest acts only through the shortcut beside the norm. {use}"
    )


def draw_advice(advice: KappaAdvice, path: Path) -> None:
    """Write the figure: the ratios on the data, the band they give, and the paths through the network."""
    with figure(path, 3, width=4.2) as (ratios, band, paths):
        draw_ratios(ratios, advice)
        draw_sums(band, advice)
        draw_paths(paths, advice)


def draw_ratios(axes: Any, advice: KappaAdvice) -> None:
    """How large the target is beside the input."""
    values, end = advice.norms.ratios, 1.3 * max(advice.high, 1.0)
    inside = values[values < end]
    counts = inside.histc(60, 0, end) / len(values)
    edges = [end * i / 60 for i in range(60)]
    axes.bar(edges, counts.tolist(), width=end / 60, align="edge", color=GREY, alpha=0.6)
    axes.axvline(advice.low, color=BLUE, linewidth=2, label=f"ratio of means {advice.low:.2f}")
    axes.axvline(advice.high, color=ORANGE, linewidth=2, label=f"97 % are below {advice.high:.2f}")
    lemma = advice.norms.lemma
    axes.axvline(lemma, color=BLUE, linewidth=1.5, linestyle="--", label=f"Lemma 3.2 {lemma:.3f}")
    axes.set(title="Target beside input", xlabel="‖target‖² / ‖x_t‖²", ylabel="share of noised images")
    axes.legend(fontsize=8.5)


def draw_sums(axes: Any, advice: KappaAdvice) -> None:
    """Σκ_j² over κ, with the band where it lies between the targets."""
    grid = [i / 200 for i in range(201)]
    axes.plot(
        grid, [sum_of_squares(advice.num_skips, kappa, advice.factors) for kappa in grid], color=GREY, linewidth=2
    )
    axes.axvspan(advice.band.low, advice.band.high, color=GREEN, alpha=0.15, linewidth=0)
    for target, colour in ((advice.low, BLUE), (advice.high, ORANGE)):
        axes.axhline(target, color=colour, linewidth=1.5)
    total = sum_of_squares(advice.num_skips, advice.kappa, advice.factors)
    axes.plot([advice.kappa], [total], "o", color=GREEN, markersize=8)
    axes.annotate(f"κ = {advice.kappa}", (advice.kappa, total), xytext=(-8, 6), textcoords="offset points", ha="right")
    band = f"{advice.band.low:.3f} to {advice.band.high:.3f}"
    axes.set(title=f"Band: {band}", xlabel="κ", ylabel=f"Σκ_j², N = {advice.num_skips}", xlim=(0, 1))
    axes.set_ylim(0, 1.25 * advice.high)


def draw_paths(axes: Any, advice: KappaAdvice) -> None:
    """What the path through each skip does to a change of the input, without scaling and with the recommended κ."""
    gains = advice.gain.path_gains
    skips = advice.gain.skips or range(1, len(gains) + 1)
    scaled = [advice.kappa ** (i - 1) * gain for i, gain in zip(skips, gains, strict=True)]
    axes.plot(skips, gains, "s-", color=ORANGE, label="κ = 1")
    axes.plot(skips, scaled, "o-", color=GREEN, label=f"κ = {advice.kappa}")
    title = f"Paths through the skips: M_0 = {advice.gain.gain:.3g}"
    axes.set(title=title, xlabel="skip i (1 = outermost)", ylabel="κ^(i−1)·P_i", xticks=list(skips))
    if min(gains, default=0) > 0:
        axes.set_yscale("log")
    axes.legend(fontsize=8.5)
