"""The figures of `scalelong theory`: what was measured beside what the laws say; and the style of our figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .input_norms import InputNorms
from .laws import input_norm
from .verify import KAIMING, RHOS, UNIT_GAIN, Verification

# Okabe and Ito's colours, which stay apart for the colour-blind.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#666666"
COLOURS, MARKERS = (ORANGE, BLUE, GREEN), ("o", "s", "^")

STYLE: dict[Any, Any] = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}


@contextmanager
def figure(path: Path, panels: int, *, width: float = 4.8, height: float = 3.7) -> Iterator[list[Any]]:
    """The axes of a figure that is written to `path` when the block ends; no window and no global state is touched."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError('figures need matplotlib: pip install "scalelong[report]"') from error
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(width * panels, height), layout="constrained")
        axes = drawn.subplots(1, panels, squeeze=False)[0]
        yield list(axes)
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(path, dpi=150)


def draw_theory(found: Verification, datasets: dict[str, InputNorms], folder: Path) -> list[Path]:
    """Write every figure into a folder; returns their paths."""
    paths = {name: folder / f"theory-{name}.png" for name in ("forward", "band", "gradients", "robustness", "inputs")}
    with figure(paths["forward"], 2) as (left, right):
        draw_forward(left, right, found)
    with figure(paths["band"], len(RHOS)) as panels:
        draw_band(panels, found)
    with figure(paths["gradients"], 2) as (left, right):
        draw_gradients(left, right, found)
    with figure(paths["robustness"], 1, width=5.6) as (axes,):
        draw_robustness(axes, found)
    with figure(paths["inputs"], 1, width=5.6) as (axes,):
        draw_inputs(axes, datasets)
    return list(paths.values())


def draw_forward(left: Any, right: Any, found: Verification) -> None:
    """E‖h_0‖² over N: Kaiming's blocks beside the paper's sum, and blocks of gain 1, where the two agree."""
    widest = max(width for _, width, *_ in found.forward)
    for axes, settings in ((left, KAIMING), (right, UNIT_GAIN)):
        for setting, colour, marker in zip(settings, COLOURS, MARKERS, strict=True):
            checks = {n: check for n, width, one, check in found.forward if (width, one) == (widest, setting)}
            laws, means = [check.expected for check in checks.values()], [check.measured for check in checks.values()]
            errors = [check.expected * (check.half_width or 0) for check in checks.values()]
            depths = list(checks)
            axes.plot(depths, laws, "-", color=colour, linewidth=1.5)
            axes.errorbar(
                depths, means, errors, fmt=marker, color=colour, markersize=5, capsize=3, label=setting.method
            )
        axes.set(xlabel="number of skips N", yscale="log")
    depths = sorted({n for n, width, *_ in found.forward if width == widest})
    paper = [sum(k**2 for k in KAIMING[0].kappas(n)) for n in depths]
    left.plot(depths, paper, "--", color=GREY, label="Σκ_j² alone (κ = 1)")
    left.set(title=f"Kaiming blocks, gain 2 (m = {widest})", ylabel="E‖h_0‖² / ‖x‖²")
    right.set(title=f"Blocks of gain 1: Σκ_j² + 1 (m = {widest})", yscale="linear")
    right.set_ylim(bottom=0)
    left.legend(fontsize=8.5)


def draw_band(panels: list[Any], found: Verification) -> None:
    """The share of networks outside Theorem 3.1's band over the width: it falls, more slowly for deeper ones."""
    depths, ticks = (sorted({row[place] for row in found.outside}) for place in (0, 1))
    for axes, rho in zip(panels, RHOS, strict=True):
        for depth, colour, marker in zip(depths, COLOURS, MARKERS, strict=False):
            rows = [row for row in found.outside if row[0] == depth and row[2] == rho]
            widths = [row[1] for row in rows]
            shown = [row[3] if row[3] > 0 else float("nan") for row in rows]
            axes.plot(widths, shown, marker, color=colour, label=f"N = {depth}")
            axes.plot(widths, [row[4] for row in rows], "-", color=colour, linewidth=1.2)
        axes.set(title=f"ρ = {rho}", xlabel="width m", xscale="log", yscale="log", ylim=(3e-4, 1.6))
        axes.set_xticks(ticks, [str(width) for width in ticks], minor=False)
        axes.minorticks_off()
    panels[0].set_ylabel("share outside the band\n(points: measured, lines: stated)")
    panels[0].legend(fontsize=8.5)


def draw_gradients(left: Any, right: Any, found: Verification) -> None:
    """Gradients of each block against the law, and how much larger those of the denoising loss are."""
    deepest = max(row[0] for row in found.gradient)
    for setting, colour, marker in zip(KAIMING, COLOURS, MARKERS, strict=True):
        rows = [row for row in found.gradient if row[:2] == (deepest, setting)]
        blocks = [row[2] for row in rows]
        left.plot(blocks, [row[5] for row in rows], "-", color=colour, linewidth=1.5)
        left.plot(blocks, [row[3] for row in rows], marker, color=colour, label=setting.method)
        right.plot(blocks, [row[4] / row[5] for row in rows], f"{marker}-", color=colour, label=setting.method)
    for axes in (left, right):
        axes.set_xticks(range(1, deepest + 2), [*map(str, range(1, deepest + 1)), "middle"])
        axes.set_xlabel("block i")
        axes.set_ylim(bottom=0)
    left.set(title=f"⟨v, h_0⟩, v independent (N = {deepest})", ylabel="E‖∇_W‖² / ‖x‖²  (lines: law)")
    right.set(title="Denoising loss ‖h_0 − ε‖²", ylabel="E‖∇_W‖² / (4ℓ‖x‖²), times the law")
    left.legend(fontsize=8.5)


def draw_robustness(axes: Any, found: Verification) -> None:
    """By what factor Theorem 3.4's bound exceeds the largest change that was found."""
    shares = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    for offset, (setting, colour, marker) in enumerate(zip(KAIMING, COLOURS, MARKERS, strict=True)):
        rows = [(n, ratios) for n, one, ratios in found.looseness if one == setting]
        low, middle, high = torch.stack([ratios.quantile(shares) for _, ratios in rows], dim=1)
        errors = torch.stack([middle - low, high - middle]).tolist()
        depths = [n + 0.3 * (offset - 1) for n, _ in rows]
        axes.errorbar(depths, middle.tolist(), errors, fmt=marker, color=colour, capsize=3)
        axes.plot([], [], marker, color=colour, label=setting.method)
    axes.axhline(1, color=GREY, linestyle="--", linewidth=1.2)
    axes.text(0.99, 0.75, "violated below", transform=axes.get_yaxis_transform(), ha="right", va="top", color=GREY)
    axes.set_xticks(sorted({n for n, *_ in found.looseness}))
    axes.set(xlabel="number of skips N", yscale="log", ylabel="bound / largest change found\n(median and range)")
    axes.set_ylim(bottom=0.05)
    axes.legend(fontsize=8.5, loc="upper left")


def draw_inputs(axes: Any, datasets: dict[str, InputNorms]) -> None:
    """‖x_t‖²/m over time: a line between E x_0² and 1, which Lemma 3.2 takes to begin at 1/3."""
    edges = torch.linspace(0, 1000, 26)
    middles = ((edges[1:] + edges[:-1]) / 2).tolist()
    for (name, norms), colour in zip(datasets.items(), (GREY, *COLOURS), strict=False):
        places = torch.bucketize(norms.times.double(), edges.double(), right=True) - 1
        means = [norms.inputs[places == place].mean().item() for place in range(25)]
        axes.plot(middles, means, color=colour, linewidth=2, label=f"{name}: mean {norms.inputs.mean():.3f}")
    lemma = input_norm(next(iter(datasets.values())).mean_alpha_bar, 1)
    axes.axhline(lemma, color=GREY, linestyle="--", linewidth=1.2)
    axes.annotate(f"Lemma 3.2: {lemma:.3f}", (990, lemma - 0.01), ha="right", va="top", color=GREY, fontsize=9)
    axes.set(xlabel="time t (linear schedule)", ylabel="E‖x_t‖² / m", ylim=(0, 1.1))
    axes.legend(fontsize=8.5, loc="lower right")
