"""The figure of the κ advisor: the ratios on the data, the band they give, and the paths through the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..theory.figures import BLUE, GREEN, GREY, ORANGE, figure
from ..theory.laws import sum_of_squares
from .advisor import KappaAdvice


def draw_advice(advice: KappaAdvice, path: Path) -> None:
    """Write the figure."""
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
    axes.plot(grid, [sum_of_squares(advice.num_skips, kappa) for kappa in grid], color=GREY, linewidth=2)
    axes.axvspan(advice.band.low, advice.band.high, color=GREEN, alpha=0.15, linewidth=0)
    for target, colour in ((advice.low, BLUE), (advice.high, ORANGE)):
        axes.axhline(target, color=colour, linewidth=1.5)
    total = sum_of_squares(advice.num_skips, advice.kappa)
    axes.plot([advice.kappa], [total], "o", color=GREEN, markersize=8)
    axes.annotate(f"κ = {advice.kappa}", (advice.kappa, total), xytext=(-8, 6), textcoords="offset points", ha="right")
    band = f"{advice.band.low:.3f} to {advice.band.high:.3f}"
    axes.set(title=f"Band: {band}", xlabel="κ", ylabel=f"Σκ_j², N = {advice.num_skips}", xlim=(0, 1))
    axes.set_ylim(0, 1.25 * advice.high)


def draw_paths(axes: Any, advice: KappaAdvice) -> None:
    """What the path through each skip does to a change of the input, without scaling and with the recommended κ."""
    gains = advice.gain.path_gains
    skips = range(1, len(gains) + 1)
    scaled = [advice.kappa ** (i - 1) * gain for i, gain in zip(skips, gains, strict=True)]
    axes.plot(skips, gains, "s-", color=ORANGE, label="κ = 1")
    axes.plot(skips, scaled, "o-", color=GREEN, label=f"κ = {advice.kappa}")
    title = f"Paths through the skips: M_0 = {advice.gain.gain:.3g}"
    axes.set(title=title, xlabel="skip i (1 = outermost)", ylabel="κ^(i−1)·P_i", xticks=list(skips))
    if min(gains) > 0:
        axes.set_yscale("log")
    axes.legend(fontsize=8.5)
