"""The figure of `scalelong probe`: accuracy over block and noise level, made of its file alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from .figures import COLOURS, figure

MOST_NUMBERS = 200  # Cells that have room for their number.


def draw_probe(file: Path, path: Path) -> list[Path]:
    """A heat map as PNG and SVG, the chosen cell framed; `path` is without the ending. Returns the files."""
    from matplotlib.patches import Rectangle

    content = json.loads(file.read_bytes())
    blocks, times, written = content["blocks"], content["times"], []
    shares = 100 * np.array(content["accuracies"])
    low, high = shares.min(), shares.max()
    with figure(path, written, height=1.4 + 0.27 * len(blocks)) as axes:
        drawn = axes.imshow(shares, aspect="auto", cmap="cividis", vmin=low, vmax=high)
        axes.figure.colorbar(drawn, ax=axes, label="accuracy, %", pad=0.02)
        axes.set_xticks(range(len(times)), [f"{time:g}" for time in times])
        axes.set_yticks(range(len(blocks)), blocks)
        axes.set(xlabel="noise level (share of the schedule)", title=title_of(content))
        axes.spines[:].set_visible(False)
        if shares.size <= MOST_NUMBERS:
            for (row, column), share in np.ndenumerate(shares):
                ink = "#111111" if share > (low + high) / 2 else "#ffffff"
                axes.text(column, row, f"{share:.0f}", ha="center", va="center", fontsize=8, color=ink)
        row, column = blocks.index(content["block"]), times.index(content["time"])
        box = {"fill": False, "linewidth": 2.2, "edgecolor": COLOURS[1]}
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, **box))
    return written


def title_of(content: dict) -> str:
    low, high = content["interval"]
    accuracy = content["correct"] / content["held_out"]
    return f"best: {content['block']}, t = {content['time']:g}; held out {accuracy:.1%} ({low:.1%} to {high:.1%})"
